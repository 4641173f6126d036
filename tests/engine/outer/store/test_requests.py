"""Requests that a store refuses: one sentence, a status, and an unchanged state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.checkpoint.format.pieces import Part, Piece
from engine.outer.messages import JoinRequest, NamedPiece, PushShare, PushState, RankLayout, StoreRefusedError
from engine.outer.store.store import Store
from tests.engine.outer.store.sites import (
    TENSORS,
    SiteOfTests,
    data_parallel_layout,
    settings_of,
    values_of,
    whole_layout,
)

SETTINGS = settings_of(rule="diloco", period=10, sites=2)
STORE: dict[str, Any] = SETTINGS["optimizer"]


def started() -> tuple[Store, SiteOfTests, SiteOfTests]:
    """Returns a store with initial weights and two sites, of one and of two ranks."""
    store = Store(SETTINGS)
    first, second = SiteOfTests(store, SETTINGS, 0), SiteOfTests(store, SETTINGS, 1, data_parallel_layout())
    first.seed(values_of(99))
    first.take()
    second.take()
    return store, first, second


def refused(call: Callable[[], Any]) -> tuple[int, str]:
    """Returns the status and the sentence of a refusal."""
    with pytest.raises(StoreRefusedError) as caught:
        call()
    assert str(caught.value).count(". ") == 0 and str(caught.value).endswith(".")
    return caught.value.status, str(caught.value)


WRONG_PUSHES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "gap": (409, "the next one of this life and fragment is 0", {"seq": 1}),
    "future": (400, "fragment 0 has versions 0 to 0", {"base": 1}),
    "unknown-fragment": (400, "fragment 3 is requested", {"fragment": 3}),
    "tokens": (400, "tokens", {"tokens": float("nan")}),
    "steps": (400, "steps", {"steps": -1}),
    "rates": (400, "learning rates", {"rates": (0.1, 0.2)}),
}


@pytest.mark.parametrize("case", WRONG_PUSHES)
def test_a_wrong_push_is_refused_and_changes_nothing(case: str) -> None:
    store, first, second = started()
    status, text, given = WRONG_PUSHES[case]
    events: list[Any] = []
    store.listeners.append(events.append)
    before = store.status()
    code, sentence = refused(lambda: first.push(values_of(1), **given))
    assert (code, text in sentence) == (status, True), sentence
    assert store.status() == before and events == []
    first.seq, first.rows = 0, 0
    assert first.push(values_of(1)) is PushState.COMPLETE
    assert second.push(values_of(2)) is PushState.COMPLETE
    assert store.status().versions == (1,)


def test_a_body_of_another_size_is_refused() -> None:
    store, first, _ = started()
    body = first.body(values_of(1))
    for wrong in (body[:-1], torch.cat([body, body]), body.view(torch.float32)):
        code, sentence = refused(lambda wrong=wrong: store.push(first.meta(), 0, PushShare(), wrong))  # type: ignore[misc]
        assert code == 400 and "124 bytes" in sentence
    assert first.push(values_of(1)) is PushState.COMPLETE


def test_a_repeated_push_is_harmless_and_another_body_is_refused() -> None:
    store, first, second = started()
    meta, body, other = first.meta(), first.body(values_of(1)), first.body(values_of(2))
    share = PushShare(1.0, 1.0)
    assert store.push(meta, 0, share, body) is PushState.COMPLETE
    assert store.push(meta, 0, share, body) is PushState.COMPLETE
    assert refused(lambda: store.push(meta, 0, share, other))[0] == 409
    second.push(values_of(3))
    assert store.push(meta, 0, share, body) is PushState.MERGED
    assert refused(lambda: store.push(meta, 0, share, other))[0] == 409
    assert store.status().versions == (1,) and store.status().waiting == []


def test_a_push_is_partial_until_all_ranks_have_sent_one_description() -> None:
    store, first, second = started()
    first.push(values_of(1))
    meta = second.meta()
    assert store.push(meta, 1, PushShare(), second.body(values_of(2), 1)) is PushState.PARTIAL
    assert store.status().versions == (0,)
    other = second.meta(tokens=9.0)
    assert refused(lambda: store.push(other, 0, PushShare(), second.body(values_of(2), 0)))[0] == 409
    assert store.push(meta, 0, PushShare(), second.body(values_of(2), 0)) is PushState.COMPLETE
    assert store.status().versions == (1,)


def test_a_site_has_one_push_under_way() -> None:
    _, first, _ = started()
    first.push(values_of(1))
    code, sentence = refused(lambda: first.push(values_of(2)))
    assert code == 409 and "one push under way" in sentence


def test_an_ended_life_is_refused() -> None:
    store, first, _ = started()
    again = SiteOfTests(store, SETTINGS, 0)
    for call in (lambda: first.push(values_of(1)), lambda: store.offer(first.life, 0), lambda: store.renew(first.life)):
        code, sentence = refused(call)
        assert code == 410 and f"life {again.life} of site 0 has replaced it" in sentence
    store.leave(again.life)
    assert refused(lambda: store.renew(again.life))[0] == 410
    assert refused(lambda: store.renew(77))[0] == 404


def test_a_version_without_an_offer_is_not_pulled() -> None:
    store, first, second = started()
    first.push(values_of(1))
    second.push(values_of(2))
    assert refused(lambda: store.pull(first.life, 0, 0, 1))[0] == 409
    assert store.offer(first.life, 0) is not None
    assert refused(lambda: store.pull(first.life, 0, 0, 0))[0] == 409
    assert store.pull(first.life, 0, 0, 1).numel() == 31


def test_a_push_of_sums_on_other_weights_is_refused() -> None:
    settings, clock = settings_of(rule="average", period=1, lease=5.0), [0.0]
    store = Store(settings, clock=lambda: clock[0])
    sites = [SiteOfTests(store, settings, site) for site in range(2)]
    sites[0].seed(values_of(99))
    for site in sites:
        site.take()
    sites[0].push(values_of(0))
    clock[0] = 4.0
    store.renew(sites[0].life)
    clock[0] = 6.0
    store.tick()
    assert store.status().versions == (1,)
    code, sentence = refused(lambda: sites[1].push(values_of(1)))
    assert code == 409 and "made without this site" in sentence


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"settings": {**SETTINGS, "period": 20}}, '"period" 20 and the store 10'),
        (
            {"settings": {**SETTINGS, "optimizer": {**STORE, "params": {**STORE["params"], "lr": 0.125}}}},
            '"optimizer.params.lr" 0.125 and the store 0.7',
        ),
        ({"tensors": TENSORS[:2]}, "other tensors"),
        ({"groups": ({"lr": 2.0},)}, "other groups"),
        ({"ranks": 0}, "0 ranks"),
        ({"site": -1}, "site -1"),
        ({"group_of": (0,)}, "1 groups are given for 3 tensors"),
    ],
)
def test_a_site_with_another_configuration_does_not_join(change: dict[str, Any], text: str) -> None:
    store, _, _ = started()
    before = store.status()
    given: dict[str, Any] = {"site": 2, "ranks": 1, "tensors": TENSORS, "settings": SETTINGS}
    _, sentence = refused(lambda: store.join(JoinRequest(**(given | change))))
    assert text in sentence
    assert store.status() == before


def test_tensors_that_cannot_be_divided_are_refused_at_the_first_join() -> None:
    settings = settings_of(rule="diloco", period=10, fragments=5)
    store = Store(settings)
    code, sentence = refused(lambda: store.join(JoinRequest(0, 1, TENSORS, settings=settings)))
    assert code == 400 and "5 fragments" in sentence


def test_pieces_cover_every_element_once() -> None:
    whole = whole_layout()[0]
    part = Part((4, 6), 1, ((0, 3),))
    wrong = {
        "twice": RankLayout((*whole.pushed, whole.pushed[1]), ()),
        "missing": RankLayout(whole.pushed[1:], ()),
        "half": RankLayout((NamedPiece("wide", part.whole()), *whole.pushed[1:]), ()),
        "outside": RankLayout((NamedPiece("bias", Piece(Part((6,)), 0, 7)),), ()),
        "beyond": RankLayout(whole.pushed, (NamedPiece("wide", Part((4, 6), 1, ((3, 9),)).whole()),)),
        "descending": RankLayout(whole.pushed, (NamedPiece("wide", Part((4, 6), 0, ((2, 3), (0, 1))).whole()),)),
        "shape": RankLayout((NamedPiece("wide", Part((6, 4)).whole()), *whole.pushed[1:]), ()),
        "unknown": RankLayout((NamedPiece("narrow", Part((2,)).whole()),), ()),
    }
    store = Store(SETTINGS)
    life = store.join(JoinRequest(0, 1, TENSORS, settings=SETTINGS)).life
    for layout in wrong.values():
        assert refused(lambda layout=layout: store.register(life, 0, layout))[0] == 400  # type: ignore[misc]
    assert refused(lambda: store.seed(life, 0, 0, torch.zeros(124, dtype=torch.uint8)))[0] == 409
    store.register(life, 0, whole)
    store.register(life, 0, whole)
    assert refused(lambda: store.register(life, 0, wrong["missing"]))[0] == 409
    assert refused(lambda: store.register(life, 1, whole))[0] == 400


def test_only_the_chosen_site_sends_initial_weights_and_another_replaces_a_dead_one() -> None:
    store = Store(SETTINGS)
    first, second = SiteOfTests(store, SETTINGS, 0), SiteOfTests(store, SETTINGS, 1)
    assert (first.joined.seeds, second.joined.seeds) == (True, False)
    assert refused(lambda: second.seed(values_of(1)))[0] == 409
    assert second.take() is None
    broken = {name: values * torch.nan for name, values in values_of(1).items()}
    assert refused(lambda: first.seed(broken))[0] == 400
    store.leave(first.life)
    third = SiteOfTests(store, SETTINGS, 2)
    assert third.joined.seeds
    third.seed(values_of(2))
    third.seed(values_of(2))
    found = second.take()
    assert found is not None and torch.equal(found[1]["wide"], values_of(2)["wide"])
    assert not SiteOfTests(store, SETTINGS, 0).joined.seeds


def test_a_store_of_several_has_its_own_fragments_only() -> None:
    settings = settings_of(rule="diloco", period=10) | {"stores": 2}
    stores = [Store(settings, number=number) for number in range(2)]
    sites = [SiteOfTests(store, settings) for store in stores]
    for number, site in enumerate(sites):
        own = [name for name, _ in TENSORS if (name == "wide") is (number == 0)]
        pieces = [each for each in site.layouts[0].pushed if each.name in own]
        body = torch.cat([values_of(9)[each.name].view(-1) for each in pieces]).view(torch.uint8)
        site.store.seed(site.life, 0, number, body)
        assert site.store.offer(site.life, number) is not None
        assert torch.equal(site.store.pull(site.life, 0, number, 0).view(torch.uint8), body)
        assert refused(lambda site=site, number=number: site.store.offer(site.life, 1 - number))[0] == 400  # type: ignore[misc]
        assert site.store.status().versions == ((0, -1) if number == 0 else (-1, 0))

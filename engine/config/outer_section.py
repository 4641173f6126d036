"""Sections "outer" and "weights_out": sites that train apart and meet in a store, and receivers of weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import urlsplit

from engine.config.optim_sections import (
    COUNT,
    NOT_NEGATIVE,
    OPTIMIZERS,
    RATIO,
    SIZE,
    OptimizerConfig,
    SgdParams,
    one_of,
)
from engine.config.reader import Sections, Typed, setting, stored
from engine.config.rules import AnyOf, Choice, Flag, Int, ListOf, Problems, Real, Text
from engine.config.sections import FOLDER, ZeroConfig
from engine.config.wording import shown_value

Rule = Literal["average", "diloco", "bsp", "ssp", "async", "quorum", "hogwild"]
RULES = ("average", "diloco", "bsp", "ssp", "async", "quorum", "hogwild")
WAITING_RULES = ("average", "diloco", "bsp")
"""Rules under which all live sites meet, and a merge is taken over after a fixed step."""
SERVER_RULES = ("bsp", "ssp", "async")
"""Rules under which the store has the optimizer of the training, at period 1."""
CODECS = ("fp64", "fp32", "bf16", "int8", "int4", "topk")
STORE_OPTIMIZERS = ("SGD", "AdamW", "Adam", "Lion")
"""Optimizers of a store: element by element, so that fragments and stores divide the tensors freely."""
_KINDS = MappingProxyType({name: OPTIMIZERS[name] for name in STORE_OPTIMIZERS})
DELTA_PERIOD = 100
"""Default period of rules that exchange differences of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptimizerConfig:
    """Optimizer of the server that merges the weight updates of several sites (separate training jobs)."""

    type: Literal["SGD", "AdamW", "Adam", "Lion"] = setting("SGD", Choice(
        options=STORE_OPTIMIZERS, noun="an optimizer of a store", fold=True,
        remedy="give SGD, AdamW, Adam or Lion, which update element by element"))  # fmt: skip
    """SGD, AdamW, Adam or Lion, in any letter case."""
    params: Mapping[str, Any] = stored(SgdParams())
    """Settings of the chosen optimizer, with all defaults filled in."""


OUTER_DEFAULTS = MappingProxyType(
    {
        "average": StoreOptimizerConfig(params=stored(SgdParams(lr=1.0))),
        "diloco": StoreOptimizerConfig(params=stored(SgdParams(lr=0.7, momentum=0.9, nesterov=True))),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterConfig:
    """Settings of a site: an engine that trains separately and merges updates with other sites, through a server or,
    with the rule hogwild, in shared memory.
    """

    url: tuple[str, ...] | str | None = setting(None, AnyOf(
        rules=(Text(noun="an address"), ListOf(each=Text(), least=1, noun="a list of addresses")),
        remedy='give the address of the store such as "http://store:8140", or a list of addresses',
        null=True))  # fmt: skip
    """Address of the store, or of several stores that divide the tensors among them."""
    serve: bool = setting(False, Flag())
    """true: rank 0 of site 0 serves the store at ``url`` from a thread; false: ``trine outer`` does."""
    site: int = setting(0, COUNT)
    """Number of this site, from 0; each site has its own."""
    sites: int = setting(1, SIZE)
    """Number of sites that the first merge waits for."""
    rule: Rule = setting("diloco", one_of(*RULES, noun="a rule of merges"))
    """average, diloco, bsp: all sites meet; ssp: a site is at most ``staleness`` pushes ahead; async: nobody waits;
    quorum: ``least`` sites and a grace; hogwild: memory shared on one host, without locks.
    """
    period: int | None = setting(None, Int(low=1, null=True))
    """Steps between two pushes of a tensor; null: 1 for bsp, ssp, async and hogwild, 100 otherwise. At period 1
    gradients are pushed, otherwise differences of weights.
    """
    staleness: int = setting(3, COUNT)
    """For ssp: pushes by which a site may be ahead of the slowest one."""
    least: int = setting(1, SIZE)
    """Number of pushes without which no merge is made, for quorum; for other rules, live sites without which none is
    made.
    """
    grace: float | Literal["adaptive"] = setting("adaptive", AnyOf(
        rules=(Choice(options=("adaptive",), noun="a grace"), NOT_NEGATIVE),
        remedy='give seconds, or "adaptive"'))  # fmt: skip
    """For quorum: seconds that a merge waits for further sites; "adaptive": 1.5 times their usual spread."""
    optimizer: StoreOptimizerConfig | None = setting(None, Typed(cls=StoreOptimizerConfig, kinds=_KINDS, null=True))
    """Optimizer of the store; null: the configuration's own for gradients, SGD with lr 1 for average, and SGD with lr
    0.7 and Nesterov momentum 0.9 otherwise.
    """
    fragments: int = setting(1, SIZE)
    """Number of groups of tensors that are pushed at different steps of a period."""
    delay: int = setting(0, COUNT)
    """Steps between a push and the step after which its merge is taken over."""
    mixing: float | None = setting(None, Real(low=0, high=1, null=True))
    """Fraction of the site's own weights after a take-over; null: merged weights plus the site's progress since its
    push.
    """
    wire: Literal["fp64", "fp32", "bf16", "int8", "int4", "topk"] = setting(
        "fp32", one_of(*CODECS, noun="a format of pushed numbers"))  # fmt: skip
    """Format of pushed numbers; int8 and int4 with a scale for 256 of them, topk with the largest ones only."""
    density: float = setting(0.03, Real(above=0, high=1))
    """For topk: fraction of each 4,096 numbers that is pushed."""
    bits: Literal[32, 2] = setting(32, Choice(options=(32, 2), noun="a number of bits"))
    """For topk: bits of a pushed number."""
    feedback: float = setting(0.0, RATIO)
    """Fraction of the encoding error that is added to the next push; 0: none."""
    weights: Literal["tokens", "steps", "equal"] = setting(
        "tokens", one_of("tokens", "steps", "equal", noun="a weight of sites"))  # fmt: skip
    """Weights of the sites' differences in a merge."""
    lease: float = setting(10.0, Real(above=0))
    """Seconds without a message after which a site counts as gone."""
    most_steps: int = setting(0, COUNT)
    """Local steps after which a site waits for a merge of its last push; 0: it never waits, unless the rule does."""
    folder: str | None = setting(None, Text(noun="a path", null=True))
    """Folder of the store: journal, pushes and snapshots. For hogwild: folder of the shared weights, which a later run
    continues.
    """
    snapshot_every: int = setting(20, SIZE)
    """Merges between two snapshots of the store; the journal has everything since the last one."""
    token_file: str | None = setting(None, Text(noun="a path", null=True))
    """File with the token that sites and store share; without it, the environment variable TRINE_OUTER_TOKEN. A store
    without a token serves its own host only.
    """

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the servers that merge the updates of several sites (separate training jobs)."""
        return () if self.url is None else (self.url,) if isinstance(self.url, str) else self.url

    @property
    def steps(self) -> int:
        """Number of training steps after which this job sends the next update of a tensor to the merging server."""
        if self.period is not None:
            return self.period
        return 1 if self.rule in SERVER_RULES or self.rule == "hogwild" else DELTA_PERIOD

    @property
    def content(self) -> Literal["sums", "gradients", "deltas"]:
        """Kind of values that a site (one of several training jobs) sends to the server that merges them.

        "sums": gradients, which the server sums for the sites' own optimizers. "gradients": gradients for the server's
        optimizer. "deltas": differences of the weights since the last message.
        """
        if self.steps > 1 or self.rule in ("quorum", "hogwild"):
            return "deltas"
        return "gradients" if self.rule in SERVER_RULES else "sums"

    def store_optimizer(self, training: OptimizerConfig | None) -> StoreOptimizerConfig:
        """Returns the optimizer of the server that merges the updates of several sites (training jobs).

        It is the first of these: ``outer.optimizer``, if set; ``training`` (the configured optimizer), if sites send
        gradients; the default for the merge rule ``outer.rule``.
        """
        if self.optimizer is not None:
            return self.optimizer
        if self.content == "gradients" and training is not None:
            return StoreOptimizerConfig(type=training.type, params=training.params)  # type: ignore[arg-type]
        return OUTER_DEFAULTS["average" if self.rule == "average" else "diloco"]


PAUSES = ("wait", "abort", "keep", "retract", "in_place")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig:
    """Receiver of published weights: a folder, a vLLM server or an SGLang server."""

    folder: str | None = setting(None, FOLDER)
    """Folder into which rank 0 writes each version as ``version-000007``, with safetensors by Hugging Face names."""
    vllm: str | None = setting(None, Text(noun="an address", null=True))
    """Address of a vLLM server, to which rank 0 passes each version."""
    sglang: str | None = setting(None, Text(noun="an address", null=True))
    """Address of an SGLang server, to which rank 0 broadcasts each version."""
    keep: int = setting(2, SIZE)
    """Number of versions that remain in ``folder``."""
    pause: Literal["wait", "abort", "keep", "retract", "in_place"] = setting(
        "wait", one_of(*PAUSES, noun="a mode of pauses"))  # fmt: skip
    """Requests under way at a new version: "wait" (vLLM) ends them first, "abort" aborts them, and "keep" (vLLM) and
    "in_place" (SGLang) continue them with the new weights. "retract" (SGLang) computes them anew; "wait" means that for
    SGLang.
    """
    check: bool = setting(False, Flag())
    """true compares parameters in the server with each version, and reads its blocks twice (vLLM), or compares the
    servers with each other (SGLang).
    """
    ranks: int = setting(1, SIZE)
    """Number of ranks of an SGLang server: tensor x pipeline ranks."""

    @property
    def address(self) -> str:
        """Address of the vLLM or SGLang server that receives the weights; empty if the receiver is a folder."""
        return self.vllm or self.sglang or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsOutConfig:
    """Settings of published weights, which receivers such as inference servers read from the training ranks."""

    to: tuple[ConsumerConfig, ...] = setting((), Sections(cls=ConsumerConfig))
    """Consumers to which rank 0 passes each version, like ``[{"vllm": "http://vllm:8000"}]``: all get it, or none."""
    every: int = setting(0, COUNT)
    """Updates between two versions; 0: only ``eng.publish_weights()`` makes one. A step makes none while a receiver
    still reads the last one.
    """
    host: str = setting("127.0.0.1", Text(noun="an address"))
    """Address at which each rank serves its elements; "0.0.0.0" serves other hosts. An address that other hosts reach
    needs a token.
    """
    port: int = setting(0, Int(low=0, high=65535))
    """Port of rank 0; rank r serves at ``port`` + r. 0: each rank takes any free one."""
    deadline: float = setting(30.0, Real(above=0))
    """Seconds within which receivers read a version; ``eng.publish_weights()`` then drops it."""
    copies: int = setting(2, Int(low=1, high=2))
    """Ranks that serve each element: 2 lets a version outlive one of them, if ranks have equal weights (below ZeRO 3).
    Images take twice the memory then.
    """
    frozen: bool = setting(False, Flag())
    """true: frozen weights are published too, quantized ones decoded; false: trained weights and buffers, such as
    adapters alone.
    """
    token_file: str | None = setting(None, Text(noun="a path", null=True))
    """File with the token that trainer and receivers share; without it, the environment variable TRINE_WEIGHTS_TOKEN.
    """

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of all vLLM servers that receive the published weights."""
        return tuple(each.vllm for each in self.to if each.vllm is not None)


def site_optimizer(outer: OuterConfig | None, training: OptimizerConfig | None) -> OptimizerConfig | None:
    """Returns the optimizer section that a site (one of several merged training jobs) uses for its own updates.

    It is ``training``, or plain SGD if the server updates the weights from gradients.
    """
    if outer is None or training is None or outer.content != "gradients":
        return training
    return replace(training, type="SGD", params=stored(SgdParams(lr=training.params["lr"])), before=())


def shared_settings(outer: OuterConfig, training: OptimizerConfig | None, clipping: float) -> dict[str, Any]:
    """Returns the settings that the merging server and all sites (training jobs) must share, as a dict of JSON values.

    ``clipping``: norm to which gradients are clipped; 0: no clipping.
    """
    names = (
        "sites", "rule", "staleness", "least", "grace", "fragments", "delay", "mixing", "wire", "density", "bits",
        "feedback", "weights", "lease",
    )  # fmt: skip
    chosen = outer.store_optimizer(training)
    return {name: getattr(outer, name) for name in names} | {
        "period": outer.steps, "content": outer.content, "stores": max(1, len(outer.urls)),
        "optimizer": {"type": chosen.type, "params": dict(chosen.params)},
        "clipping": clipping if outer.content == "gradients" else 0.0,
    }  # fmt: skip


def check_weights_out(weights_out: WeightsOutConfig | None, problems: Problems) -> None:
    """Adds a problem for each entry of ``weights_out.to`` that does not name exactly one receiver, has a malformed
    address, or has a ``pause`` mode that the receiver lacks.
    """
    for index, each in enumerate(weights_out.to if weights_out is not None else ()):
        at = f"weights_out.to[{index}]"
        if problems.touch(at):
            continue
        kinds = [name for name in ("folder", "vllm", "sglang") if getattr(each, name) is not None]
        if len(kinds) != 1:
            problems.add(at, f"{' and '.join(kinds) or 'no consumer'} in one entry; give one of folder, vllm, sglang.")
            continue
        (kind,) = kinds
        check_address(f"{at}.{kind}", each.address or None, problems)
        modes = {"vllm": ("wait", "abort", "keep"), "sglang": ("wait", "abort", "retract", "in_place")}.get(
            kind, PAUSES
        )
        if each.pause not in modes:
            problems.add(f"{at}.pause", f'"{each.pause}" is no mode of {kind}; give {", ".join(modes)}.')


def check_address(key: str, url: str | None, problems: Problems) -> None:
    """Adds a problem if ``url``, the value of the configuration key ``key``, is not an http address with a host."""
    if url is not None and not (url.startswith(("http://", "https://")) and _has_host(url)):
        problems.add(key, f"{shown_value(url)} is not an address; give http://HOST:PORT.")


def check_outer(
    outer: OuterConfig | None,
    training: OptimizerConfig | None,
    clipping: float,
    zero: ZeroConfig,
    problems: Problems,
) -> None:
    """Adds a problem for each setting of section ``outer`` that has no effect, or contradicts another setting.

    ``clipping``: norm to which gradients are clipped; 0: no clipping.
    """
    if outer is None:
        return
    if zero.offload_optimizer.delayed_update:
        problems.add(
            "zero_optimization.offload_optimizer.delayed_update",
            "true, but section outer reads the weights directly after each update; leave delayed_update or outer out.",
        )
    if outer.content == "gradients" and outer.optimizer is None and training is not None and training.before:
        problems.add(
            "optimizer",
            f'a list, but with outer.rule "{outer.rule}" the store updates all parameters with one optimizer; give one '
            "optimizer instead of the list, or set outer.optimizer to the optimizer of the store.",
        )
    if outer.content == "gradients" and clipping and len(outer.urls) > 1:
        problems.add(
            "gradient_clipping",
            f'{clipping:g}, but with outer.rule "{outer.rule}" each of the {len(outer.urls)} stores in outer.url knows '
            "the norm of only its own gradients; give one address in outer.url, or leave gradient_clipping out.",
        )
    if outer.rule == "hogwild":
        _check_hogwild(outer, problems)
    elif not outer.urls and not problems.touch("outer"):
        problems.add("outer.url", "missing; give the address that `trine outer` prints, such as http://store:8140.")
    _check_sites(outer, problems)
    _check_period(outer, problems)
    _check_store_optimizer(outer, training, problems)


def _check_sites(outer: OuterConfig, problems: Problems) -> None:
    """Adds problems of the addresses of stores and the numbers of sites."""
    if outer.serve and len(outer.urls) != 1:
        problems.add(
            "outer.serve",
            f"true with {len(outer.urls)} addresses in outer.url, but site 0 serves exactly one store; give one "
            "address, or leave outer.serve out and start each store with the command `trine outer`.",
        )
    for url in outer.urls:
        if not url.startswith(("http://", "https://")):
            problems.add("outer.url", f'"{url}" does not begin with http:// or https://; give http://HOST:PORT.')
        elif not _has_host(url):
            problems.add(
                "outer.url", f'"{url}" has no host or no valid port; give http://HOST:PORT with a port from 1 to 65535.'
            )
    if outer.least > outer.sites > 1:
        problems.add(
            "outer.least",
            f"{outer.least} is more than outer.sites ({outer.sites}), so no merge would be made; give at most "
            f"{outer.sites}.",
        )
    if outer.site >= outer.sites and outer.sites > 1 and outer.rule in WAITING_RULES:
        problems.add(
            "outer.sites",
            f"{outer.sites}, but outer.site is {outer.site}, and sites are numbered from 0; give the number of all "
            f"sites that start the training, or an outer.site of at most {outer.sites - 1}.",
        )


def _check_store_optimizer(outer: OuterConfig, training: OptimizerConfig | None, problems: Problems) -> None:
    """Adds problems of the store's optimizer."""
    chosen = outer.store_optimizer(training)
    if chosen.type not in STORE_OPTIMIZERS and outer.content != "sums":
        problems.add(
            "outer.optimizer.type",
            f"missing, and a store cannot use {chosen.type} from section optimizer, because it does not update element "
            f"by element; give one of {', '.join(STORE_OPTIMIZERS)}.",
        )
    lossy = [key for key, on in (("outer.feedback", outer.feedback), ("outer.wire", outer.wire == "topk")) if on]
    if outer.content == "deltas" and chosen.params.get("momentum") and lossy:
        problems.add(
            lossy[0],
            f"{outer.feedback or shown_value(outer.wire)}, but the store's optimizer has momentum "
            f"{chosen.params['momentum']:g}, and the two together give a higher loss than either alone; set "
            f'outer.optimizer to {{"type": "SGD", "params": {{"lr": 1.0}}}}, or leave {" and ".join(lossy)} out.',
        )


def _has_host(url: str) -> bool:
    try:
        return bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except ValueError:
        return False


def _check_hogwild(outer: OuterConfig, problems: Problems) -> None:
    """Adds problems of settings of a store, which Hogwild does not have."""
    if outer.folder is None:
        problems.add(
            "outer.folder", "missing; give a folder that all sites of this host share, such as /dev/shm/my-run."
        )
    for key in ("url", "optimizer", "mixing"):
        if getattr(outer, key) is not None:
            problems.add(
                f"outer.{key}", "has no effect with rule hogwild, whose weights are in shared memory; leave it out."
            )
    for key, default in (("fragments", 1), ("delay", 0), ("wire", "fp32"), ("feedback", 0.0)):
        if getattr(outer, key) != default:
            problems.add(
                f"outer.{key}", "has no effect with rule hogwild, whose weights are in shared memory; leave it out."
            )


def _check_period(outer: OuterConfig, problems: Problems) -> None:
    """Adds problems of period, fragments, delay and format."""
    if outer.fragments > outer.steps:
        problems.add(
            "outer.fragments",
            f"{outer.fragments}, but outer.period is {outer.steps}, and each step pushes at most one fragment; give at "
            f"most {outer.steps}.",
        )
    elif outer.delay >= max(1, outer.steps // outer.fragments) and outer.delay:
        problems.add(
            "outer.delay",
            f"{outer.delay}, but the delay must be below {outer.steps // outer.fragments}, the number of steps between "
            "two pushes (outer.period divided by outer.fragments); give at most "
            f"{outer.steps // outer.fragments - 1}.",
        )
    if outer.content == "deltas":
        return
    for key, default in (("mixing", None), ("feedback", 0.0)):
        if getattr(outer, key) != default:
            problems.add(f"outer.{key}", "has no effect at period 1, which pushes gradients; leave it out.")
    if outer.wire not in ("fp64", "fp32"):
        problems.add(
            "outer.wire",
            f'"{outer.wire}" is not exact, but at outer.period 1 the store sums gradients exactly; give "fp32", or a '
            "longer outer.period.",
        )
    if outer.content == "sums" and outer.optimizer is not None:
        problems.add(
            "outer.optimizer",
            "has no effect at period 1, where gradients are summed before the site's own optimizer; leave it out, or "
            "give a longer period.",
        )

"""Behaviour that DeepSpeed's own tests describe, as small programs over its names, for the real one and for the door.

``python -m tests.deepspeed.restated`` runs all with the package ``deepspeed`` and prints what they give as JSON, which
``tests.deepspeed.record`` keeps. Each gives numbers, words and truth values; one process is enough for all of them.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tests.deepspeed.restated_engine import CONFIG, net, part, rows, run, seen, started
from tests.deepspeed.restated_schedules import (
    REFUSED,
    SCHEDULES,
    momenta_in_an_engine,
    momenta_of_each_group,
    momenta_of_one_cycle,
    rates_after_a_jump,
    rates_alone,
    rates_from_a_position,
    rates_of_an_engine,
    refused_value,
)

Case = Callable[[Any], list[Any]]


def schedule_after_load(states: bool, ds: Any) -> list[Any]:
    section = {"type": "WarmupLR", "params": SCHEDULES["WarmupLR"]}
    eng = started(ds, gradient_accumulation_steps=1, scheduler=section)
    run(eng, 3)
    with tempfile.TemporaryDirectory() as folder:
        eng.save_checkpoint(folder)
        other = started(ds, gradient_accumulation_steps=1, scheduler=section)
        other.load_checkpoint(folder, load_lr_scheduler_states=states)
    found = [other.optimizer.param_groups[0]["lr"]]
    for micro in range(3, 6):
        run(other, 1, micro)
        found += [other.get_lr()[0], seen(other)]
    return found


def each_step_updates(stage: int, backwards: int, ds: Any) -> list[Any]:
    eng = started(ds, None, stage, gradient_accumulation_steps=4, managed_gradient_accumulation=False)
    found = list[Any]()
    for step in range(4):
        for micro in range(backwards):
            eng.backward(eng(rows(10 * step + micro)).square().mean())
        eng.step()
        found += [seen(eng), eng.global_steps]
    return found


def undivided_losses(stage: int, ds: Any) -> list[Any]:
    eng = started(ds, None, stage)
    found = list[Any]()
    for micro in range(4):
        loss = eng(rows(micro)).square().mean()
        found.append(float(eng.backward(loss, scale_wrt_gas=False).detach()))
        eng.step()
    return [*found, seen(eng)]


def returned_loss(ds: Any) -> list[Any]:
    eng = started(ds)
    loss = eng(rows(0)).square().mean()
    return [float(loss.detach()), float(eng.backward(loss).detach())]


def samples_of_unequal_steps(ds: Any) -> list[Any]:
    """Rows are counted by the microbatches that a script gives each step, also over a checkpoint."""
    eng, found = started(ds, managed_gradient_accumulation=False), list[Any]()
    for micros in (2, 3, 1):
        for micro in range(micros):
            eng.backward(eng(rows(micro)).square().mean())
        eng.step()
        found += [eng.global_samples, eng.global_steps, eng.micro_steps]
    with tempfile.TemporaryDirectory() as folder:
        eng.save_checkpoint(folder)
        other = started(ds, managed_gradient_accumulation=False)
        other.load_checkpoint(folder)
    return [*found, other.global_samples, seen(other)]


def rows_of_a_loader(ds: Any) -> list[Any]:
    eng = started(ds)
    data = torch.utils.data.TensorDataset(torch.arange(7.0))
    found = [batch[0].tolist() for batch in eng.deepspeed_io(data, route="eval")]
    found += [batch[0].tolist() for batch in eng.deepspeed_io(data, 3, data_sampler=[6, 1, 0, 2])]
    once = sorted(row for batch in eng.deepspeed_io(data) for row in batch[0].tolist())
    return [json.dumps(found), json.dumps(once)]


def optimizer_of_a_callable(ds: Any) -> list[Any]:
    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    made = ds.initialize(model=net(), config=config, optimizer=lambda params: torch.optim.AdamW(params, lr=0.1))[1]
    return [isinstance(made, torch.optim.AdamW), made.param_groups[0]["lr"]]


def older_argument(ds: Any) -> list[Any]:
    """The configuration under the name that DeepSpeed's first releases gave it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.json")
        file.write_text(json.dumps(CONFIG), encoding="utf-8")
        eng = ds.initialize(args=argparse.Namespace(deepscale_config=str(file), local_rank=0), model=net())[0]
    return [eng.train_micro_batch_size_per_gpu(), eng.gradient_accumulation_steps()]


def words_of_a_configuration(ds: Any) -> list[Any]:
    config, found = part(ds, "runtime.config").DeepSpeedConfig, list[Any]()
    made = config({"train_batch_size": 4, "gradient_allreduce_op": "SUM", "checkpoint": {"tag_validation": "warn"}})
    try:
        config({"train_batch_size": 4, "checkpoint": {"tag_validation": "often"}})
    except ds.DeepSpeedConfigError:
        found.append("DeepSpeedConfigError")
    return [*found, made.gradient_allreduce_op, ds.__version_major__, ds.__version_minor__]


def norm_between_updates(ds: Any) -> list[Any]:
    eng = started(ds, None, 1)
    found = list[Any]()
    for micro in range(5):
        run(eng, 1, micro)
        norm = eng.get_global_grad_norm()
        found.append(None if norm is None else float(norm))
    return found


def counters(ds: Any) -> list[Any]:
    eng, found = started(ds), list[Any]()
    for micro in range(5):
        found.append(eng.is_gradient_accumulation_boundary())
        run(eng, 1, micro)
        found += [eng.was_step_applied(), eng.global_steps, eng.micro_steps, eng.global_samples, eng.skipped_steps]
    return [*found, eng.train_batch_size(), eng.zero_optimization_stage(), eng.gradient_clipping()]


def values_of_a_frozen_parameter(stage: int, ds: Any) -> list[Any]:
    utils, model = part(ds, "utils"), net()
    model.get_parameter("0.weight").requires_grad_(False)
    eng = started(ds, model, stage, gradient_accumulation_steps=1)
    eng.backward(eng(rows(0)).square().mean())
    reads = (utils.safe_get_full_grad, utils.safe_get_full_fp32_param)
    found = [read(p) is None for p in model.parameters() for read in reads]
    eng.step()
    found += [utils.safe_get_full_optimizer_state(p, "exp_avg") is None for p in model.parameters()]
    return [*found, seen(eng)]


def gradients_updated_together(stage: int, ds: Any) -> list[Any]:
    utils, model = part(ds, "utils"), net()
    eng, found = started(ds, model, stage, gradient_accumulation_steps=1), list[Any]()
    for micro in range(3):
        eng.backward(eng(rows(micro)).square().mean())
        utils.safe_update_full_grad_vectorized(list(model.parameters()), lambda grad, _: grad * 0.5 + 0.001)
        found += [float(utils.safe_get_full_grad(p).norm()) for p in model.parameters()]
        eng.step()
    return [*found, seen(eng)]


def gradients_inside_an_accumulation(stage: int, ds: Any) -> list[Any]:
    """Read after every backward of a step; a read changes nothing."""
    utils, model = part(ds, "utils"), net()
    eng, found = started(ds, model, stage), list[Any]()
    for micro in range(4):
        eng.backward(eng(rows(micro)).square().mean())
        for parameter in model.parameters():
            grad = utils.safe_get_full_grad(parameter)
            found.append(None if grad is None else float(grad.norm()))
        eng.step()
    return [*found, seen(eng)]


def some_of_the_parameters(stage: int, ds: Any) -> list[Any]:
    model = net()
    own = {"model_parameters": list(model.get_submodule("0").parameters())}
    clip = CONFIG["gradient_clipping"] if stage else 0.0  # stage 0 of DeepSpeed clips by gradients that no one updates
    eng = started(ds, model, stage, given=own, gradient_accumulation_steps=1, gradient_clipping=clip)
    found = list[Any]()
    for micro in range(3):
        run(eng, 1, micro)
        found.append(seen(eng))
    return found


def optimizer_over_some(stage: int, ds: Any) -> list[Any]:
    model = net()
    own = {"optimizer": torch.optim.AdamW(model.get_submodule("2").parameters(), lr=1e-2, eps=1e-6)}
    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    zero: dict[str, Any] = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 1}
    zero |= {} if stage else {"gradient_clipping": 0.0}
    eng = ds.initialize(model=model, config=config | zero, **own)[0]
    run(eng, 3)
    return [seen(eng)]


def engine_without_an_optimizer(stage: int, ds: Any) -> list[Any]:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    eng, _, loader, schedule = ds.initialize(model=net(), config=config)
    return [seen(eng), loader is None, schedule is None]


def schedule_of_a_callable(ds: Any) -> list[Any]:
    def decay(over: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(over, lambda step: 0.5**step)

    eng, _, _, made = ds.initialize(model=net(), config=CONFIG | {"gradient_accumulation_steps": 1}, lr_scheduler=decay)
    found = [type(made).__name__, eng.get_lr()[0]]
    for micro in range(3):
        run(eng, 1, micro)
        found += [made.get_last_lr()[0], seen(eng)]
    return found


def directly_called_networks(ds: Any) -> list[Any]:
    """A generator and a discriminator that are called as modules, after each other's steps."""
    torch.manual_seed(3)
    maker, judge = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    more: dict[str, Any] = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}
    made, judged = started(ds, maker, **more), started(ds, judge, **more)
    criterion, found = nn.BCEWithLogitsLoss(), list[Any]()
    ones, zeros = torch.ones(2, 1), torch.zeros(2, 1)
    for step in range(4):
        judge.zero_grad()
        judged.backward(criterion(judge(rows(step)), ones))
        fake = maker(rows(50 + step))
        judged.backward(criterion(judge(fake.detach()), zeros))
        judged.step()
        maker.zero_grad()
        loss = criterion(judge(fake), ones)
        made.backward(loss)
        made.step()
        found.append(float(loss.detach()))
    return found


def whole_weights_of_a_checkpoint(stage: int, ds: Any) -> list[Any]:
    eng = started(ds, None, stage, gradient_accumulation_steps=1)
    run(eng, 2)
    with tempfile.TemporaryDirectory() as folder:
        eng.save_checkpoint(folder)
        there = Path(folder, "zero_to_fp32.py").is_file()
        state = part(ds, "utils.zero_to_fp32").get_fp32_state_dict_from_zero_checkpoint(folder)
    return [there, *(part for name in sorted(state) for part in (name, float(state[name].abs().sum())))]


def empty_folder(ds: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        path, state = started(ds).load_checkpoint(folder)
    return [path is None, state is None]


def client_state(ds: Any) -> list[Any]:
    eng = started(ds)
    run(eng, 2)
    with tempfile.TemporaryDirectory() as folder:
        eng.save_checkpoint(folder, tag="best", client_state={"epoch": 3, "seen": [1, 2]})
        other = started(ds)
        path, state = other.load_checkpoint(folder)
        latest = Path(folder, "latest").read_text(encoding="utf-8").strip()
    return ["best" in Path(path).parts, state["epoch"], len(state["seen"]), latest, other.global_steps, seen(other)]


def twice(stage: int, ds: Any) -> list[Any]:
    model, found = net(), list[Any]()
    for _ in range(2):
        eng = started(ds, model, stage, gradient_accumulation_steps=1)
        run(eng, 2)
        found.append(seen(eng))
        eng.destroy()
    return found


def sizes(given: Mapping[str, Any], ds: Any) -> list[Any]:
    made = part(ds, "runtime.config").DeepSpeedConfig(dict(given))
    return [
        made.train_batch_size, made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps,
        made.zero_enabled, made.gradient_clipping,
    ]  # fmt: skip


def leaves(ds: Any) -> list[Any]:
    utils, model = part(ds, "utils"), nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    marked = utils.set_z3_leaf_modules(model, [nn.Linear])
    return [len(marked), len(utils.get_z3_leaf_modules(model)), utils.z3_leaf_module(model[1])]


def repeated(ds: Any) -> list[Any]:
    loader = iter(part(ds, "utils").RepeatingLoader([1, 2, 3]))
    return [next(loader) for _ in range(8)]


def topology(ds: Any) -> list[Any]:
    made = part(ds, "runtime.pipe.topology").PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    lists = [made.get_axis_comm_lists(axis) for axis in ("pipe", "data", "model")]
    return [
        made.world_size(),
        json.dumps(lists),
        made.filter_match(pipe=1),
        made.get_rank_repr(5),
        made.get_dim("pipe"),
        made.get_coord(5) == made.ProcessCoord(1, 0, 1),
    ]


def arguments(ds: Any) -> list[Any]:
    parser = ds.add_config_arguments(argparse.ArgumentParser())
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json"])
    return [given.deepspeed, given.deepspeed_config, parser.parse_args([]).deepspeed]


def _cases() -> Iterator[tuple[str, Case]]:
    for kind in SCHEDULES:
        yield f"rates of {kind}", partial(rates_alone, kind)
        yield f"rates of {kind} after a jump", partial(rates_after_a_jump, kind)
        yield f"rates of {kind} from a position", partial(rates_from_a_position, kind)
        yield f"rates of {kind} in an engine", partial(rates_of_an_engine, kind)
    for what in REFUSED:
        yield f"refused: {what}", partial(refused_value, what)
    for states in (True, False):
        yield f"schedule after load, states {states}", partial(schedule_after_load, states)
    for stage in (0, 1, 2):
        yield f"each step updates, stage {stage}", partial(each_step_updates, stage, 3)
    yield "each step updates after one backward", partial(each_step_updates, 0, 1)
    for stage in (0, 2):
        yield f"undivided losses, stage {stage}", partial(undivided_losses, stage)
    for stage in (0, 3):
        yield f"engine without an optimizer, stage {stage}", partial(engine_without_an_optimizer, stage)
    for stage in (1, 2, 3):
        yield f"a frozen parameter, stage {stage}", partial(values_of_a_frozen_parameter, stage)
        yield f"gradients updated together, stage {stage}", partial(gradients_updated_together, stage)
        yield f"whole weights of a checkpoint, stage {stage}", partial(whole_weights_of_a_checkpoint, stage)
    for stage in (0, 1, 2, 3):
        yield f"some of the parameters, stage {stage}", partial(some_of_the_parameters, stage)
        yield f"an optimizer over some, stage {stage}", partial(optimizer_over_some, stage)
    for stage in (0, 1, 3):  # DeepSpeed refuses it at stage 2
        yield f"gradients inside an accumulation, stage {stage}", partial(gradients_inside_an_accumulation, stage)
    for stage in (0, 1, 2, 3):
        yield f"initialize after destroy, stage {stage}", partial(twice, stage)
    yield "sizes from the total", partial(sizes, {"train_batch_size": 8, "gradient_accumulation_steps": 2})
    yield "sizes from the parts", partial(sizes, {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.5})
    yield "sizes with a stage", partial(sizes, {"train_batch_size": 4, "zero_optimization": {"stage": 2}})
    for case in (
        returned_loss, norm_between_updates, counters, schedule_of_a_callable, directly_called_networks, empty_folder,
        client_state, leaves, repeated, topology, arguments, momenta_of_one_cycle, momenta_in_an_engine,
        momenta_of_each_group, samples_of_unequal_steps, rows_of_a_loader, optimizer_of_a_callable, older_argument,
        words_of_a_configuration,
    ):  # fmt: skip
        yield case.__name__.replace("_", " "), case


CASES: Mapping[str, Case] = MappingProxyType(dict(_cases()))


def main(words: Sequence[str]) -> None:
    """Print what every program gives with the real DeepSpeed; one that fails there is named on stderr and left out.

    ``words``: run the programs alone whose name has one of them.
    """
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}
    os.environ.update(alone)
    ds = import_module("deepspeed")
    ds.init_distributed(dist_backend="gloo")
    found = dict[str, Any]()
    for name, case in CASES.items():
        if words and not any(word in name for word in words):
            continue
        try:
            found[name] = json.loads(json.dumps(case(ds)))
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    print("RESTATED " + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])

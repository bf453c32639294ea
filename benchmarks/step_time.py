"""Time of one training step beside torch's FSDP2, measured so that noise hits all alike.

One process group; the modes of step_modes.py take turns step by step in the same run, in an
order that rotates. Prints, per mode, median and quartiles of the wall time (slowest rank), the
process CPU time and the page faults (mean over ranks), and the ratio of each step to FSDP2's
step of the same turn. Ends with exit code 1 where losses do not agree.

    python benchmarks/step_time.py --world 2 --config A
    python benchmarks/step_time.py --world 2 --config B --transport gloo --malloc tuned
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from step_modes import CONFIGS, MODES, Config, Step, build_step
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

MALLOC_TUNED = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
LOSS_TOLERANCE = 1e-4
"""Nats per token; sums over ranks are made in different orders."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One step of one mode on one rank."""

    wall_s: float
    cpu_s: float
    page_faults: int
    loss: float


Samples = dict[str, list[Sample]]


def main() -> int:
    """Measure and print; return the exit code."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["HP_TRANSPORT"] = options.transport
    runs = []
    for malloc in ("default", "tuned") if options.malloc == "both" else (options.malloc,):
        by_rank = run_ranks(options, malloc)
        figures = {mode: summarize(by_rank, mode, options.warmup) for mode in options.modes}
        faults = find_loss_faults(by_rank)
        show(options, malloc, figures, faults)
        runs.append({"malloc": malloc, "figures": figures, "loss_faults": faults})
    if options.json is not None:
        setting = {name: value for name, value in vars(options).items() if name != "json"}
        result = {"setting": setting, "machine": describe_machine(), "runs": runs}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(run["loss_faults"] for run in runs) else 0


def run_ranks(options: argparse.Namespace, malloc: str) -> list[Samples]:
    """Start the ranks and return what each of them measured."""
    for name, value in MALLOC_TUNED.items():
        os.environ.pop(name, None)
        if malloc == "tuned":  # read by the C library when a rank starts
            os.environ[name] = value
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, args=(options, folder), nprocs=options.world)
        parts = [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(options.world)]
    return [
        {mode: [Sample(*values) for values in part[mode]] for mode in options.modes}
        for part in parts
    ]


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--config", choices=sorted(CONFIGS), default="A")
    parser.add_argument("--transport", choices=("shm", "gloo"), default="shm", help="of `ours`")
    parser.add_argument("--malloc", choices=("default", "tuned", "both"), default="both")
    parser.add_argument("--steps", type=int, default=20, help="measured steps per mode")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Measure on one rank and leave the samples in a file."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.world
    )
    config = CONFIGS[options.config]
    steps = {mode: build_step(mode, config) for mode in options.modes}
    samples = measure(steps, config, options.warmup + options.steps)
    plain = {mode: [list(asdict(s).values()) for s in of] for mode, of in samples.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(plain))
    distributed.barrier()
    distributed.destroy_process_group()


def measure(steps: dict[str, Step], config: Config, turns: int) -> Samples:
    """Let the modes take turns, step by step, each on the same data."""
    names = list(steps)
    samples: Samples = {name: [] for name in names}
    for turn in range(turns):
        tokens = draw_tokens(config, turn)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(measure_step(steps[name], tokens))
    return samples


def measure_step(step: Step, tokens: Tensor) -> Sample:
    """Run one step, from the moment all ranks are ready."""
    distributed.barrier()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    loss = step(tokens)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    distributed.all_reduce(loss)
    return Sample(wall_s, cpu_s, faults, loss.item() / distributed.get_world_size())


def draw_tokens(config: Config, turn: int) -> Tensor:
    """Return this rank's part of the data of one turn; "B S+1"."""
    generator = torch.Generator().manual_seed(1000 * turn + distributed.get_rank())
    shape = (config.sequences, config.length + 1)
    return torch.randint(config.vocabulary, shape, generator=generator)


def summarize(by_rank: list[Samples], mode: str, warmup: int) -> dict[str, list[float]]:
    """Return quartiles of one mode's figures and of its ratio to fsdp2, turn by turn."""
    turns = list(zip(*(samples[mode] for samples in by_rank), strict=True))[warmup:]
    wall_s = [max(sample.wall_s for sample in turn) for turn in turns]
    figures = {
        "wall_ms": quartiles([value * 1e3 for value in wall_s]),
        "cpu_ms": quartiles([statistics.mean(s.cpu_s for s in turn) * 1e3 for turn in turns]),
        "page_faults": quartiles([statistics.mean(s.page_faults for s in turn) for turn in turns]),
    }
    if "fsdp2" in by_rank[0]:
        theirs = list(zip(*(samples["fsdp2"] for samples in by_rank), strict=True))[warmup:]
        theirs_s = [max(sample.wall_s for sample in turn) for turn in theirs]
        ratios = [mine / other for mine, other in zip(wall_s, theirs_s, strict=True)]
        figures["ratio_to_fsdp2"] = quartiles(ratios)
    return figures


def quartiles(values: list[float]) -> list[float]:
    """Return first quartile, median and third quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if values[1:] else values * 3


def find_loss_faults(by_rank: list[Samples]) -> list[str]:
    """Compare losses over modes; plain exchanges no gradients, so only its first one counts."""
    samples = by_rank[0]
    reference = next(iter(mode for mode in ("fsdp2", "ddp", *samples) if mode in samples))
    faults = []
    for mode, of in samples.items():
        pairs = list(zip(of, samples[reference], strict=True))
        compared = pairs[:1] if "plain" in (mode, reference) else pairs
        worst = max(abs(mine.loss - other.loss) for mine, other in compared)
        if not worst <= LOSS_TOLERANCE:
            faults.append(f"losses of {mode} and {reference} differ by {worst:.2e}")
    return faults


def show(
    options: argparse.Namespace,
    malloc: str,
    figures: dict[str, dict[str, list[float]]],
    faults: list[str],
) -> None:
    """Print the figures as a table."""
    print(
        f"config {options.config}, {options.world} ranks, ours over {options.transport}, "
        f"malloc {malloc}, {options.steps} steps; median [quartiles]"
    )
    print(f"{'mode':6} {'wall ms':>24} {'cpu ms':>24} {'page faults':>24} {'wall / fsdp2':>18}")
    for mode, of in figures.items():
        cells = [f"{cell(of[name], 1):>24}" for name in ("wall_ms", "cpu_ms", "page_faults")]
        ratio = cell(of["ratio_to_fsdp2"], 2) if "ratio_to_fsdp2" in of else "-"
        print(f"{mode:6} {' '.join(cells)} {ratio:>18}")
    print("; ".join(faults) or f"losses agree within {LOSS_TOLERANCE} (plain: the first one)")


def cell(values: list[float], digits: int) -> str:
    """Return quartiles as "median [first third]"."""
    low, median, high = values
    return f"{median:.{digits}f} [{low:.{digits}f} {high:.{digits}f}]"


def describe_machine() -> dict[str, str | int | None]:
    """Return what the figures depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
    }


if __name__ == "__main__":
    sys.exit(main())

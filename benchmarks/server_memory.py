"""Memory and time of the server as its cohort grows: our Collector beside Flower's FedAvg.

Both get the same replies through the same LocalGrid, from a ClientApp that makes its update when it is asked.
Our Collector takes them one by one; Flower's FedAvg gets what `send_and_receive` returns, a list. A third
process only runs the clients and drops their replies: memory of the clients, not of any server. A fourth keeps
the mean in float64, to tell whose mean is off where the two differ.

Each runs in its own process, `python -m benchmarks.server_memory <server> <cohort> <order> <out.npz>`.
"""

import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from benchmarks.machine import Row, Section
from fedplat import wire
from fedplat.federation import client_name
from fedplat.job import Job, validate_job
from fedplat.model import Arrays
from fedplat.wire import Identity
from server_app.collect import Collector
from server_app.exchange import Exchange
from simulations.local_grid import FIRST_NODE_ID, LocalGrid

COHORTS = (10, 100, 1000)
SHAPES = {"in.weight": (800, 784), "in.bias": (800,), "mid.weight": (480, 800), "mid.bias": (480,),
          "out.weight": (10, 480), "out.bias": (10,)}  # fmt: skip
MODEL_BYTES = 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
GROWTH_LIMIT = 1.25
"""Peak memory at the largest cohort over that at the smallest: a constant, but for noise."""
LARGEST = 1.5
"""No coordinate of a model or update here is larger."""
ROUNDING = 2.0**-24
"""Relative error of one float32 rounding."""
ROUND = 1


@dataclass(frozen=True)
class Cost:
    """What one round cost a process, besides what the clients themselves took."""

    peak_bytes: int
    """Growth of the resident memory over what it was before the round."""
    cpu_s: float


def measure_memory() -> Section:
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for cohort in COHORTS for row in _measure_cohort(cohort, Path(folder))]
    peaks = [row for row in rows if row.unit == "× model"]
    rows.append(_constant_memory(peaks))
    return Section(
        "Server memory and time by cohort size",
        f"One round of {MODEL_BYTES / 4e6:.2f} M float32 parameters; peak growth of resident memory in models "
        f"({MODEL_BYTES / 1e6:.1f} MB). 'Clients only' makes the replies and drops them; its memory is in the "
        "others' too. CPU time per update leaves out the clients' own.",
        rows,
    )


def _constant_memory(peaks: list[Row]) -> Row:
    first, last = peaks[0], peaks[-1]
    beside = {"flower": last.beside["flower"] / first.beside["flower"]}
    what = f"peak at {COHORTS[-1]} over peak at {COHORTS[0]} clients"
    return Row(what, last.value / first.value, "×", GROWTH_LIMIT, beside)


def _measure_cohort(cohort: int, folder: Path) -> list[Row]:
    costs = {server: _in_own_process(server, cohort, 1, folder / f"{server}-1.npz") for server in SERVERS}
    for server in SERVERS_COMPARED:
        _in_own_process(server, cohort, 2, folder / f"{server}-2.npz")
    means = {path.stem: _flat(path) for path in folder.glob("*.npz")}
    return [*_cost_rows(cohort, costs), *_mean_rows(cohort, means)]


def _cost_rows(cohort: int, costs: dict[str, Cost]) -> list[Row]:
    peaks = {server: cost.peak_bytes / MODEL_BYTES for server, cost in costs.items()}
    times = {server: 1e3 * cost.cpu_s / cohort for server, cost in costs.items()}
    beside = {"flower": peaks["flower"], "clients only": peaks["clients"]}
    return [
        Row(f"{cohort} clients: peak memory", peaks["fedplat"], "× model", None, beside),
        Row(f"{cohort} clients: CPU per update", times["fedplat"], "ms", None, {"flower": times["flower"]}),
    ]


def _mean_rows(cohort: int, means: dict[str, np.ndarray]) -> list[Row]:
    """Our mean is the float64 mean rounded once; Flower's rounds with every update, so the two differ by that."""
    moved = {server: _count_different_bits(means[f"{server}-1"], means[f"{server}-2"]) for server in SERVERS_COMPARED}
    errors = {server: _distance(means[f"{server}-1"], means["float64-1"]) for server in SERVERS_COMPARED}
    difference = _distance(means["fedplat-1"], means["flower-1"])
    rows = [
        Row(
            f"{cohort} clients: coordinates whose bits depend on the order",
            moved["fedplat"],
            limit=0,
            beside={"flower": moved["flower"]},
        ),
        Row(
            f"{cohort} clients: max error of the mean",
            errors["fedplat"],
            limit=LARGEST * ROUNDING,
            beside={"flower": errors["flower"]},
        ),
        Row(f"{cohort} clients: max |our mean − Flower's|", difference, limit=2 * cohort * LARGEST * ROUNDING),
    ]
    for row in rows:
        assert row.met, f"wrong mean: {' '.join(row.cells())}"
    return rows


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.max(np.abs(one.astype(np.float64) - other)))


def _count_different_bits(one: np.ndarray, other: np.ndarray) -> int:
    return int(np.count_nonzero(one.view(np.uint32) != other.view(np.uint32)))


def _flat(path: Path) -> np.ndarray:
    with np.load(path) as arrays:
        return np.concatenate([arrays[name].reshape(-1) for name in SHAPES])


def _in_own_process(server: str, cohort: int, order: int, out: Path) -> Cost:
    command = [sys.executable, "-m", "benchmarks.server_memory", server, str(cohort), str(order), str(out)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Cost(**json.loads(done.stdout))


# --- in the process that is measured ----------------------------------------------------------------


class Clients:
    """A ClientApp whose update depends on nothing but the client's number."""

    def __init__(self, model: Arrays) -> None:
        self._model = model
        self.cpu_s = 0.0
        self.app = ClientApp()
        self.app.train()(self._train)

    def _train(self, message: Message, context: Context) -> Message:
        started = time.process_time()
        number = int(context.node_config["partition-id"])
        asked = Identity.of(message.content, wire.CONFIG)
        identity = Identity(asked.job, asked.round, asked.attempt, client_name(number))
        content = wire.reply_content(identity, 1 + number % 97, {"loss": 0.5}, wire.encode_arrays(self._update(number)))
        reply = Message(content, reply_to=message)
        self.cpu_s += time.process_time() - started
        return reply

    def _update(self, number: int) -> Arrays:
        stream = np.random.default_rng(number)
        update = {}
        for name, start in self._model.items():
            update[name] = stream.random(start.shape, dtype=np.float32)
            update[name] -= np.float32(0.5)
            update[name] += start
        return update


@dataclass(frozen=True)
class Round:
    """A round about to be sent."""

    job: Job
    model: Arrays
    grid: LocalGrid
    requests: list[Message]


def prepare(cohort: int, order: int) -> tuple[Round, Clients]:
    job = validate_job({"cohort": {"clients": cohort, "size": cohort}}, "benchmark")
    stream = np.random.default_rng(0)
    model = {name: stream.random(shape, dtype=np.float32) for name, shape in SHAPES.items()}
    clients = Clients(model)
    grid = LocalGrid(clients.app, cohort, {})
    content = RecordDict({wire.ARRAYS: wire.encode_arrays(model), wire.CONFIG: Identity(job.digest, ROUND, 1).record()})
    requests = [Message(content, dst_node_id=node, message_type="train") for node in grid.get_node_ids()]
    random.Random(order).shuffle(requests)
    return Round(job, model, grid, requests), clients


def serve_fedplat(this: Round) -> Arrays:
    names = {FIRST_NODE_ID + i: client_name(i) for i in range(len(this.requests))}
    collector = Collector(this.job, ROUND, this.model, names, True, lambda event: None)
    collector.run(Exchange(this.grid, this.job.cohort.deadline_s), this.requests)
    return _aggregate(collector.replies())


def serve_flower(this: Round) -> Arrays:
    return _aggregate(list(this.grid.send_and_receive(this.requests)))


def serve_nobody(this: Round) -> Arrays:
    for message_id in list(this.grid.push_messages(this.requests)):
        for reply in this.grid.pull_messages([message_id]):
            assert not reply.has_error(), reply.error
    return this.model


def serve_float64(this: Round) -> Arrays:
    total = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    weight = 0
    for message_id in list(this.grid.push_messages(this.requests)):
        for reply in this.grid.pull_messages([message_id]):
            count = int(reply.content.metric_records[wire.METRICS][wire.NUM_EXAMPLES])  # type: ignore[arg-type]
            for name, array in wire.decode_arrays(reply.content.array_records[wire.ARRAYS]).items():
                total[name] += np.multiply(array, count, dtype=np.float64)
            weight += count
    return {name: array / weight for name, array in total.items()}


def _aggregate(replies: list[Message]) -> Arrays:
    arrays, _ = FedAvg().aggregate_train(ROUND, replies)
    if arrays is None:
        raise RuntimeError("nothing was aggregated")
    return wire.decode_arrays(arrays)


SERVERS: dict[str, Callable[[Round], Arrays]] = {
    "fedplat": serve_fedplat,
    "flower": serve_flower,
    "clients": serve_nobody,
    "float64": serve_float64,
}
SERVERS_COMPARED = ("fedplat", "flower")


def _resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak). `ru_maxrss` would start at the parent's: it survives exec."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}")


def main() -> None:
    server, cohort, order, out = sys.argv[1:]
    logging.getLogger("flwr").setLevel(logging.ERROR)
    this, clients = prepare(int(cohort), int(order))
    before_bytes, started = _resident_bytes("VmRSS"), time.process_time()
    mean = SERVERS[server](this)
    cost = Cost(_resident_bytes("VmHWM") - before_bytes, time.process_time() - started - clients.cpu_s)
    with Path(out).open("wb") as file:
        np.savez(file, **mean)  # type: ignore[arg-type]
    print(json.dumps(asdict(cost)))


if __name__ == "__main__":
    main()

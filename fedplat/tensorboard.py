"""Events to TensorBoard: live as a listener of a run, or afterwards from its event log."""

from pathlib import Path

from fedplat.errors import UsageError
from fedplat.events import ClientTrained, Evaluated, Event, RoundFinished, read_events
from fedplat.rundir import RunDirectory


class TensorBoardWriter:
    """A listener that writes scalars per round, and per client under clients/."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError("TensorBoard is not installed: pip install 'fedplat[tensorboard]'") from None
        self._writer = SummaryWriter(str(folder))

    def __call__(self, event: Event) -> None:
        match event:
            case RoundFinished():
                self._scalars("train", event.metrics, event)
            case Evaluated():
                self._scalars(f"{event.where}", event.metrics, event)
            case ClientTrained():
                self._scalars(f"clients/{event.client}", event.metrics, event)
            case _:
                pass

    def _scalars(self, group: str, metrics: dict[str, float], event: RoundFinished | Evaluated | ClientTrained) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{group}/{name}", value, event.round, walltime=event.time)

    def close(self) -> None:
        self._writer.close()


def export_run(run: RunDirectory, folder: Path) -> None:
    writer = TensorBoardWriter(folder)
    for event in read_events(run.events_file):
        writer(event)
    writer.close()

"""Best model, target and patience: what an evaluation means for the run."""

from fedplat.job_sections import EvaluationSection
from server_app.checkpoint import Progress

LOWER_IS_BETTER = frozenset({"loss"})


def is_better(value: float, best: float | None, evaluation: EvaluationSection) -> bool:
    if best is None:
        return True
    gain = best - value if evaluation.metric in LOWER_IS_BETTER else value - best
    return gain > evaluation.min_delta


def reached(value: float, evaluation: EvaluationSection) -> bool:
    if evaluation.target is None:
        return False
    lower = evaluation.metric in LOWER_IS_BETTER
    return value <= evaluation.target if lower else value >= evaluation.target


def after_evaluation(progress: Progress, value: float, round_number: int, evaluation: EvaluationSection) -> Progress:
    """The progress after one more value of the watched metric."""
    if is_better(value, progress.best_value, evaluation):
        progress = progress.model_copy(update={"best_value": value, "best_round": round_number, "stale": 0})
    else:
        progress = progress.model_copy(update={"stale": progress.stale + 1})
    if reached(value, evaluation):
        return progress.model_copy(update={"stop": "target"})
    if evaluation.patience is not None and progress.stale >= evaluation.patience:
        return progress.model_copy(update={"stop": "patience"})
    return progress

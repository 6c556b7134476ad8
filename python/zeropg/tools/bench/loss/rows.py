"""Outcomes of runs as rows: what was measured on limited links joined with the losses of all seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, median

from zeropg.tools.bench.loss.arms import ARMS, BASELINE
from zeropg.tools.bench.loss.curves import Pace, paired_difference, steps_to
from zeropg.tools.bench.loss.outcome import Outcome
from zeropg.tools.bench.results import Row, Spread

TOLERANCE = 0.02  # nats above the baseline's final loss that count as reaching it; between medians over the seeds


@dataclass(frozen=True)
class Study:
    """One task over one link.

    runs: an outcome per seed; none where only steps were timed.
    timed: steps on the link, none where runs were on it.
    """

    task: str
    link: str
    steps: int
    lr_factors: dict[str, float]
    runs: dict[str, list[Outcome]]
    timed: dict[str, Outcome]

    def paced(self, arm: str) -> list[Outcome]:
        """Where an arm's times and bytes come from."""
        return [self.timed[arm]] if self.timed else self.runs[arm]

    def seconds(self, arm: str) -> Pace:
        """Of a step. Runs on the link have the mean of all their steps, those of the warm-up among them."""
        if not self.timed:
            return Pace(fmean(fmean(run.step_seconds) for run in self.runs[arm]))
        return self._paced(arm, self.timed[arm].typical_step(ARMS[arm].cycle), lambda timed: timed.typical_step(1))

    def sent_bytes(self, arm: str) -> Pace:
        """Of a step, likewise."""
        each = fmean(outcome.bytes_per_step for outcome in self.paced(arm))
        if not self.timed:
            return Pace(each)
        return self._paced(arm, each, lambda timed: timed.bytes_per_step)

    def _paced(self, arm: str, each: float, of: Callable[[Outcome], float]) -> Pace:
        """`each` for the steps after the warm-up, if there is one; before, what it is `of` the arm it trains like."""
        steps = ARMS[arm].warm_up_steps(self.steps)
        return Pace(each, of(self.timed[ARMS[arm].warms_up_as]), steps) if steps else Pace(each)


def rows_of(study: Study, *, may_claim: bool) -> list[Row]:
    """A row for each arm, and one for each point of its curve."""
    reached = {arm: _seconds_to_loss(study, arm) for arm in study.runs}
    rows = []
    for arm in study.runs:
        figures = _losses(study, arm) | _paces(study, arm)
        if math.isfinite(reached[arm]):
            figures["to_loss_s"] = reached[arm]
            if may_claim and arm != BASELINE:
                figures["faster_than_ddp"] = reached[BASELINE] / reached[arm]
        rows.append(Row(study.task, arm, figures, {"link": study.link}))
        rows += _points(study, arm)
    return rows


def _final(study: Study, arm: str) -> list[float]:
    return [run.curve[-1][1] for run in study.runs[arm]]


def _losses(study: Study, arm: str) -> dict[str, Spread | float]:
    if not study.runs[arm]:
        return {}
    final, baseline = _final(study, arm), _final(study, BASELINE)
    figures: dict[str, Spread | float] = {"lr_factor": study.lr_factors[arm]}
    if not all(math.isfinite(loss) for loss in (*final, *baseline)):
        return figures | {"diverged_seeds": float(sum(not math.isfinite(loss) for loss in final))}
    figures["loss"] = Spread.of(final)
    figures["accuracy_percent"] = Spread.of(_accuracies(study, arm))
    if arm != BASELINE:
        figures |= _difference("loss_difference", final, baseline)
        figures |= _difference("accuracy_difference", _accuracies(study, arm), _accuracies(study, BASELINE))
    return figures


def _accuracies(study: Study, arm: str) -> list[float]:
    return [run.accuracy_percent for run in study.runs[arm]]


def _difference(name: str, values: list[float], baseline: list[float]) -> dict[str, Spread | float]:
    """The mean over seeds, and the ends of its 95 % interval where there are several."""
    difference = paired_difference(values, baseline)
    if not math.isfinite(difference.low):
        return {name: difference.mean}
    return {name: difference.mean, f"{name}_low": difference.low, f"{name}_high": difference.high}


def _paces(study: Study, arm: str) -> dict[str, Spread | float]:
    paced = study.paced(arm)
    seconds, sent = study.seconds(arm), study.sent_bytes(arm)
    figures: dict[str, Spread | float] = {
        "step_ms": Spread.of([1000 * each for outcome in paced for each in outcome.step_seconds]),
        "step_kb": sent.each / 1e3,
        "total_s": seconds.at(study.steps),
        "total_mb": sent.at(study.steps) / 1e6,
    }
    coded = {name: fmean(getattr(each, f"{name}_seconds") for each in paced) for name in ("encode", "decode", "wire")}
    return figures | {f"{name}_ms": 1000 * each for name, each in coded.items() if each > 0}


def _seconds_to_loss(study: Study, arm: str) -> float:
    """Until the loss, its median over the seeds, is the baseline's at its end; infinite where it never is."""
    if not study.runs[arm]:
        return math.inf
    step = steps_to(_median_curve(study, arm), median(_final(study, BASELINE)) + TOLERANCE)
    return study.seconds(arm).at(step) if math.isfinite(step) else math.inf


def _median_curve(study: Study, arm: str) -> list[tuple[int, float]]:
    """Over the seeds; it ends where one of them diverges."""
    curve = []
    for points in zip(*(run.curve for run in study.runs[arm]), strict=True):
        losses = [loss for _, loss in points]
        if not all(map(math.isfinite, losses)):
            break
        curve.append((points[0][0], median(losses)))
    return curve


def _points(study: Study, arm: str) -> Iterator[Row]:
    seconds, sent = study.seconds(arm), study.sent_bytes(arm)
    for at, (step, _) in enumerate(study.runs[arm][0].curve if study.runs[arm] else ()):
        losses = [run.curve[at][1] for run in study.runs[arm]]
        if all(math.isfinite(loss) for loss in losses):
            figures: dict[str, Spread | float] = {"loss": Spread.of(losses)}
            figures |= {"elapsed_s": seconds.at(step), "sent_mb": sent.at(step) / 1e6}
            yield Row(study.task, arm, figures, {"link": study.link, "step": step})

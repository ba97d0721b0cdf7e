"""Show a training: stages with a progress bar, loss, agreement and the time left."""

from __future__ import annotations

from skipsearch.cli.progress import StageView
from skipsearch.training.driver import TrainEvent
from skipsearch.training.trainer import TrainProgress
from skipsearch.tuning.events import Notice, StageProgress, StageStarted

LINE_INTERVAL = 0.1  # fraction of the training between two lines on a pipe


class TrainView(StageView):
    """A listener of `train` that prints its events.

    A pipe also gets a line for each tenth of the training.
    """

    interruption = (
        "interrupted; the same command continues from the last checkpoint, half a minute old at "
        "most"
    )
    last_reported = 0.0  # share of the training

    def __call__(self, event: TrainEvent) -> None:
        match event:
            case StageStarted(title):
                self.start_stage(title)
            case StageProgress(done, total):
                self.update_stage(done, total)
            case Notice(sentence):
                self.say(sentence, style="dim")
            case TrainProgress(share_done=share):
                note = (
                    f"step {event.n_steps}: loss {event.loss:.3f}, agreement {event.agreement:.3f}"
                )
                self.update_stage(share, 1.0, note)
                if not self.is_live and share >= self.last_reported + LINE_INTERVAL:
                    self.last_reported = share
                    self.say(f"  {note}, {event.seconds_left:.0f} s left")

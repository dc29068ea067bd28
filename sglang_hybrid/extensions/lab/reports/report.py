"""One page about a replay: what each policy was worth, by cache size, prompt length, model and
traffic, with the plots of the paper's evaluation.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from sglang_hybrid import serving
from sglang_hybrid.extensions.lab.reports import plots
from sglang_hybrid.extensions.lab.reports.figures import Plot, clock, draw
from sglang_hybrid.extensions.lab.reports.study import Study, hits_by_tier, lost_tokens, size_words
from sglang_hybrid.extensions.lab.runner import Result
from sglang_hybrid.extensions.lab.simulation.baselines import SGLANG_RUNNING_STATES
from sglang_hybrid.extensions.lab.simulation.system_names import FORESIGHT, ORACLES

MARK = "sglang_hybrid replay report"
FORESEEN = (FORESIGHT, *ORACLES)


class Report:
    """A directory that is there with all it should hold, or not at all.

    Enter it before the replay: a directory that cannot be written is an error then, not after
    minutes.
    """

    def __init__(self, directory: Path, command: str, seed: int) -> None:
        self.directory = directory
        self.command = command
        self.seed = seed

    def __enter__(self) -> Self:
        """Raises ValueError, in one sentence, for a place where a report cannot be."""
        where = self.directory
        self._demand_replaceable()
        try:
            where.absolute().parent.mkdir(parents=True, exist_ok=True)
            prefix = f".{where.name}."
            made = tempfile.mkdtemp(prefix=prefix, dir=where.absolute().parent)
        except OSError as error:
            raise ValueError(f"no report can be written to {where} ({error.strerror})") from error
        self._part = Path(made)
        self._part.chmod(0o755)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._part, ignore_errors=True)

    def write(self, study: Study) -> None:
        """Draw everything and put the report in its place."""
        drawn = draw(study)
        for plot in drawn:
            plots.save(plot.figure, self._part / f"{plot.name}.png", "png")
        (self._part / "index.html").write_text(self._page(study, drawn))
        self._demand_replaceable()
        if self.directory.exists():
            for path in self.directory.iterdir():
                path.unlink()
        os.replace(self._part, self.directory)

    def _page(self, study: Study, drawn: Sequence[Plot]) -> str:
        environment = Environment(
            loader=FileSystemLoader([Path(__file__).parent, *serving.__path__]),
            autoescape=True,
            undefined=StrictUndefined,
        )
        found = study.at_compared()
        first = study.results[0]
        bests = [r for n, r in found.items() if n.split(" ")[0] not in plots.BOUNDS]
        best = max(bests or list(found.values()), key=lambda result: result.hit_tokens)
        return environment.get_template("report.html").render(
            mark=MARK,
            trace=first.job.trace,
            requests=len(first.input_len),
            tokens=int(first.input_len.sum()),
            size=study.where,
            best=best,
            found=found,
            several=len(study.budgets) > 1,
            rows=[(_size(r), r, plots.colour(r.job.policy)) for r in study.results],
            timed=study.first.time is not None,
            hits_by_tier=hits_by_tier(found),
            lost_tokens=lost_tokens(found),
            plots=[(plot, Markup(_svg(plot.figure))) for plot in drawn],
            cost=first.job.cost,
            serving=first.job.serving,
            sglang_states=SGLANG_RUNNING_STATES,
            upper=next((name for name in FORESEEN if leads(name, found)), None),
            foreseen=any(name in found for name in FORESEEN),
            clock=clock(study),
            command=self.command,
            seed=self.seed,
        )

    def _demand_replaceable(self) -> None:
        """Raises ValueError if anything is there but an empty directory or an earlier report: its
        page, and the plots that the page names.
        """
        where = self.directory
        if not os.path.lexists(where):
            return
        holds_report = False
        with suppress(OSError, UnicodeDecodeError):
            files = {path.name: path.lstat().st_mode for path in where.iterdir()}
            plain = not where.is_symlink() and all(map(stat.S_ISREG, files.values()))
            page = (where / "index.html").read_text() if files and plain else ""
            named = all(f'"{name}"' in page for name in files.keys() - {"index.html"})
            holds_report = plain and named and (not files or MARK in page[:500])
        if not holds_report:
            raise ValueError(
                f"{where} exists and holds something else than a report; give a new directory"
            )


def _size(result: Result) -> str:
    tiers = result.job.tiers
    return size_words(result.job.budget) if tiers is None else str(tiers)


def leads(name: str, results: Mapping[str, Result]) -> bool:
    """True if no system found more, but one without bounds."""
    others = [r.hit_tokens for other, r in results.items() if other not in (name, "unbounded")]
    return name in results and results[name].hit_tokens >= max(others, default=0)


def _svg(figure: Figure) -> str:
    """The figure as inline SVG, without what comes before its element."""
    buffer = io.StringIO()
    plots.save(figure, buffer, "svg")
    text = buffer.getvalue()
    return text[text.index("<svg") :]

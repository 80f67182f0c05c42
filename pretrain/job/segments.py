"""Segments of a Slurm job, and the decision whether the job continues, from files on disk alone.

A job that needs longer than Slurm gives it runs in segments: the same job, requeued. Every segment
writes its beginning and its end into RUN/slurm/segments.jsonl (or
SHARDS-slurm/task_I/segments.jsonl). A segment whose node died without a word is known by its
missing end. `job_kinds` says what a job works at and how far the work is.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from data_pipeline.io.files import sync
from data_pipeline.io.forms import Count
from pretrain.errors import UserError
from pretrain.job.job_kinds import JobKind
from pretrain.runs.directory import CONTINUE, FINISHED, STOPPED
from pretrain.runs.removal import remove_file
from pretrain.runs.storage import storage_sentence

REFUSED = "refused"
"""File of a segment's logs with the sentence of a refusal."""
REQUEUE = "requeue"
STOP = "stop"
RUNNING_JOB = "RUNNING"


class _Record(TypedDict):
    """A line of segments.jsonl.

    Beginnings and ends have `progress`, beginnings have `written`, ends have `preempted`,
    exclusions have `excluded`.
    """

    event: Literal["begin", "end", "exclude"]
    job: str
    restart: Count
    progress: NotRequired[Count]
    written: NotRequired[str]
    preempted: NotRequired[bool]
    excluded: NotRequired[list[str]]


_RECORD = TypeAdapter(_Record)


@dataclass(frozen=True)
class SlurmJob:
    """This job, from its environment."""

    number: str
    restarts: int
    nodes: str

    @staticmethod
    def read(environment: Mapping[str, str]) -> SlurmJob:
        """Read the variables that Slurm sets in a job.

        Raises:
            UserError: not inside a Slurm job.
        """
        if "SLURM_JOB_ID" not in environment:
            raise UserError("SLURM_JOB_ID is not set: this verb is for the job scripts in slurm/")
        return SlurmJob(
            environment["SLURM_JOB_ID"],
            int(environment.get("SLURM_RESTART_COUNT", "0")),
            environment.get("SLURM_JOB_NODELIST", ""),
        )


@dataclass(frozen=True)
class Ending:
    """The end of a segment's processes, and Slurm's state of the job at that moment.

    Attributes:
        exit_code: Exit code of the processes.
        job_state: State in `scontrol show job`; any but RUNNING means that Slurm or a person has
            decided.
        preempted: Whether the job is being preempted.
        asked: Whether the script was asked to continue later (SIGUSR1), which ends a job that
            writes no state file.
        refused: Sentence with which all ranks refused, as they would again.
    """

    exit_code: int
    job_state: str
    preempted: bool = False
    asked: bool = False
    refused: str = ""


@dataclass(frozen=True)
class Decision:
    """What becomes of a job.

    Attributes:
        action: FINISHED, REQUEUE or STOP.
        reason: Sentence for the job's log.
    """

    action: str
    reason: str


class Segments:
    """The record of a job's segments."""

    def __init__(self, work: JobKind) -> None:
        self.work = work
        self.path = work.records / "segments.jsonl"

    def begin(self, job: SlurmJob, max_stalled: int, ranks: int | None = None) -> Path:
        """Record a segment's beginning.

        Args:
            max_stalled: Most segments in a row that may make no progress.
            ranks: Number of ranks on which the work continues; None: it has no ranks.

        Returns:
            The directory of the segment's logs.

        Raises:
            UserError: `max_stalled` segments of this job in a row made no progress, or the record
                cannot be written.
        """
        reached = self.work.reached()
        stalled = self.stalled(job, reached)
        if stalled >= max_stalled:
            raise UserError(self.crash_loop(stalled, reached, "the logs of the last segments"))
        logs = self.logs(job)
        with self._writing():
            logs.mkdir(parents=True, exist_ok=True)
            remove_file(logs / REFUSED)  # of another job of this number
        on = {"nodes": job.nodes} if ranks is None else {"nodes": job.nodes, "ranks": ranks}
        facts = {"progress": reached, "logs": str(logs), "written": self.work.written()}
        self._append("begin", job, {**on, **facts})
        return logs

    def logs(self, job: SlurmJob) -> Path:
        """Return the directory of this segment's logs: one file per rank."""
        return self.path.parent / f"job_{job.number}-restart_{job.restarts}"

    def stalled(self, job: SlurmJob, reached: int) -> int:
        """Count the job's latest segments that began where the work still is.

        Beginnings are counted, not exit codes or Slurm's restarts: a segment that reached its time
        limit saved something, and a dead node wrote no end. Preempted segments are not the run's
        fault, and segments that found a bad node have a limit of their own. A new submission begins
        at 0, because somebody has looked at the job.

        Args:
            reached: Progress of the work now.
        """
        records = self._records(job)
        count = 0
        blameless = {
            record["restart"]
            for record in records
            if record["event"] == "exclude" or record.get("preempted", False)
        }
        for record in reversed(records):
            if record["event"] == "begin" and record["restart"] not in blameless:
                if record.get("progress") != reached:
                    break
                count += 1
        return count

    def end(self, job: SlurmJob, ending: Ending, max_stalled: int) -> Decision:
        """Decide what becomes of the job and record it.

        Args:
            max_stalled: Most segments in a row that may make no progress.

        Raises:
            UserError: the record cannot be written.
        """
        decision = self._decide(job, ending, max_stalled)
        facts = {
            "exit_code": ending.exit_code,
            "preempted": ending.preempted,
            "progress": self.work.reached(),
        }
        decided = {"decision": decision.action, "reason": decision.reason}
        self._append("end", job, {**facts, **decided})
        return decision

    def _decide(self, job: SlurmJob, ending: Ending, max_stalled: int) -> Decision:
        begun = [record for record in self._records(job) if record["event"] == "begin"]
        earlier_mark = begun[-1].get("written", "") if begun else ""
        outcome = self.work.outcome(ending.exit_code, earlier_mark)
        if outcome == FINISHED:
            return Decision(FINISHED, f"{self.work.title} is finished")
        if ending.job_state != RUNNING_JOB:
            return Decision(
                STOP, f"Slurm has ended this segment itself (the job is {ending.job_state})"
            )
        if outcome == CONTINUE:
            return Decision(REQUEUE, "saved; there is more to do")
        if outcome == STOPPED:
            if ending.preempted:
                return Decision(REQUEUE, "saved before preemption; there is more to do")
            return Decision(
                STOP, "stopped and saved, as SIGTERM asked; the same sbatch command continues"
            )
        if ending.asked:
            return Decision(REQUEUE, "ended before the time limit; finished parts are kept")
        if ending.refused:
            return Decision(STOP, f"refused, and would be again: {ending.refused}")
        reached = self.work.reached()
        stalled = self.stalled(job, reached)
        if stalled >= max_stalled:
            return Decision(STOP, self.crash_loop(stalled, reached, "the error above"))
        return Decision(
            REQUEUE,
            f"crashed with exit code {ending.exit_code}; continues from progress {reached} "
            f"({stalled} of {max_stalled} segments without progress)",
        )

    def crash_loop(self, stalled: int, reached: int, see: str) -> str:
        """Return the sentence of the guard against crash loops; `see` names where the reason is."""
        return (
            f"crash loop: {stalled} segments in a row made no progress (all began at {reached}); "
            f"see {see} and {self.path.parent}, then submit again"
        )

    def exclude(self, job: SlurmJob, nodes: list[str], already: list[str], most: int) -> list[str]:
        """Return the nodes that the job leaves out from now on.

        Args:
            nodes: Nodes that failed the preflight.
            already: Nodes left out before, by sbatch or by an earlier segment.
            most: Most nodes that may be left out beyond those of sbatch.

        Raises:
            UserError: more than `most` nodes would be left out, or the record cannot be written.
        """
        excluded = {node for record in self._records(job) for node in record.get("excluded", [])}
        all_excluded = sorted(excluded | set(nodes))
        if len(all_excluded) > most:
            raise UserError(
                f"{len(all_excluded)} nodes failed the preflight ({', '.join(all_excluded)}), "
                f"ORA_MAX_EXCLUDED_NODES={most} are allowed; "
                f"see {self.path.parent}, fix them or raise the number, then submit again"
            )
        self._append("exclude", job, {"excluded": sorted(set(nodes))})
        return sorted(set(already) | set(all_excluded))

    def _records(self, job: SlurmJob) -> list[dict[str, Any]]:
        """Return the records of this submission in order, without a line torn by a dying node."""
        records: list[dict[str, Any]] = []
        if not self.path.is_file():
            return records
        for line in self.path.read_bytes().splitlines():
            try:
                record: Any = _RECORD.validate_json(line, strict=True)
            except ValidationError:
                continue
            if record["job"] == job.number:
                if record["event"] == "begin" and record["restart"] == 0:
                    records.clear()  # another cluster, or a new life of it, used the number
                records.append(record)
        return records

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError raised inside into a UserError."""
        try:
            yield
        except OSError as error:
            raise UserError(storage_sentence(error, self.path)) from error

    def _append(self, event: str, job: SlurmJob, facts: dict[str, Any]) -> None:
        record = {"event": event, "job": job.number, "restart": job.restarts, **facts}
        line = json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **record}) + "\n"
        with self._writing(), self.path.open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = "\n" + line  # a dying node tore the last one
            file.write(line.encode())
            sync(file)

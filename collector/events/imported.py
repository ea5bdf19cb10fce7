"""What other tools' files say that we have no span for: telemetry of importers."""

from __future__ import annotations

from typing import Literal

from unskew.collector.events.base import Telemetry


class IterationTimed(Telemetry, frozen=True, kw_only=True, tag="iteration_timed@1", gc=False):
    """How long an iteration of an imported run took, where its source has it; `rank` None = the job as a whole.

    `start_us` counts from where the source's own clock does; `loss` is as the source reports it. `attempt`: a restarted job
    executes an iteration again, and its last attempt counts.
    """

    iteration: int
    wall_us: int
    rank: int | None = None
    start_us: int | None = None
    loss: float | None = None
    tokens: int | None = None
    sequences: int | None = None
    attempt: int = 0


class SourceRecorded(Telemetry, frozen=True, kw_only=True, tag="source_recorded@1", gc=False):
    """One record of an imported trace for which no other event has a place: a kernel, an annotation, a marker, a scalar.

    `category` and `track` (thread, stream, task) are the source's words. `wall_us` None = a point in time.
    """

    rank: int
    name: str
    category: str
    start_us: int
    iteration: int | None = None
    wall_us: int | None = None
    track: str = ""
    value: float | None = None


class OperationsRecorded(Telemetry, frozen=True, kw_only=True, tag="operations_recorded@1"):
    """An imported rank's iteration in its source's own words and numbers: column by column, in the source's order of rows.

    The n-th of each list is one operation, which is also a `Span` (in microseconds; `group` = name, `group_seq` = sequence).
    -1 where the source has none: `chunk` (model chunk on its stage), `global_chunk` (in the model), `micro_batch`.
    """

    iteration: int
    rank: int
    replica: int
    stage: int
    name: tuple[str, ...]
    start_s: tuple[float, ...]
    duration_s: tuple[float, ...]
    sequence: tuple[int, ...]
    chunk: tuple[int, ...]
    global_chunk: tuple[int, ...]
    micro_batch: tuple[int, ...]


class CollectiveRecorded(Telemetry, frozen=True, kw_only=True, tag="collective_recorded@1"):
    """One entry of a rank's flight recorder: how far a collective or message had come when the buffer was written.

    Of all entries of a process group, those with the same `group_seq` (`p2p_seq` for messages) are the same operation on
    different ranks. Times are the source's wall clock; None = did not happen, or was not noticed.
    """

    rank: int
    record: int
    group: str
    group_description: str
    group_seq: int
    op: str
    state: Literal["scheduled", "started", "completed"]
    p2p_seq: int | None = None
    op_id: int | None = None
    is_p2p: bool = False
    retired: bool | None = None
    created_us: int | None = None
    started_us: int | None = None
    completed_us: int | None = None
    wall_us: int | None = None
    timeout_us: int | None = None
    input_sizes: str = ""
    output_sizes: str = ""
    dtypes: str = ""


class GroupRecorded(Telemetry, frozen=True, kw_only=True, tag="group_recorded@1"):
    """A process group as one rank's flight recorder knows it: its members and the last collective it saw reach each state.

    -1 = none yet, None = not in the dump. A dump has members by the group's name and states by a number of its own
    (`group_id`); where no entry ties the two together, `group` is "" and `members` empty in the event with the states.
    """

    rank: int
    group: str = ""
    group_id: str = ""
    group_description: str = ""
    members: tuple[int, ...] = ()
    last_enqueued: int | None = None
    last_started: int | None = None
    last_completed: int | None = None

"""Exports of a real run: judged by ByteDance's model, drawn without overlaps, scraped; and back again."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from base64 import b64encode
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families
from support.training.runtime_runs import SMALL, Run, train
from typer.testing import CliRunner, Result

from unskew.analytics.diagnosis.trace.model import from_operations
from unskew.analytics.diagnosis.trace.section import record
from unskew.analytics.diagnosis.trace.whatif import what_if
from unskew.cli import app
from unskew.collector.events import RunStarted
from unskew.collector.formats.exporters import straggler_analysis as straggler_export
from unskew.collector.formats.importers.straggler_analysis import operations
from unskew.collector.formats.registry import bring_in, take_out
from unskew.collector.paths import Store
from unskew.collector.read.reader import open_store
from unskew.collector.write.commands import hold_controller_lock
from unskew.collector.write.control_stream import ControlStream

pytestmark = [pytest.mark.limit(120), pytest.mark.slow]
ORDER = ["step", "rank", "optype", "seq_id"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("exported"), "slow:rank=1,factor=2.0,at=2", base=SMALL, mode="observe", iterations=6)


def export(run: Run, format: str, *more: str) -> Result:
    return CliRunner().invoke(app, ["export", format, run.id, "--store", str(run.store.root), *more])


def exported(run: Run, format: str, path: Path) -> Path:
    answer = export(run, format, "--out", str(path))
    assert answer.exit_code == 0, answer.output
    return path


def test_a_run_goes_out_as_a_straggler_trace_and_comes_back_row_for_row(run: Run, tmp_path: Path) -> None:
    path = exported(run, "straggler-analysis", tmp_path / "trace.parquet")
    rows = polars.read_parquet(path)
    assert rows.schema["optype"] == polars.Categorical
    rows = rows.with_columns(polars.col("optype").cast(polars.String))
    assert rows.schema["start_ts"] == rows.schema["duration"] == polars.Float32
    store = Store.locate(tmp_path / "store")
    (back,) = bring_in(store, "straggler-analysis", path)
    with open_store(store) as reader:
        again = straggler_export.trace(reader, back.run)
    assert again.schema == rows.schema
    assert again.sort(ORDER).equals(rows.sort(ORDER))
    chunks = run.sql("select count(*) as n from chunks where run = $run")[0]["n"]
    assert rows.filter(polars.col("optype").str.ends_with("-compute")).height == chunks


def test_bytedances_model_replays_our_trace_and_blames_the_slow_rank(run: Run, tmp_path: Path) -> None:
    """Logical time: their model of dependencies must reproduce each step's time, or a row says something false.

    The first iteration waits for the groups to stand, which is no operation.
    """
    path = exported(run, "straggler-analysis", tmp_path / "trace.parquet")
    store = Store.locate(tmp_path / "store")
    (back,) = bring_in(store, "straggler-analysis", path)
    with open_store(store) as reader:
        rows = operations(reader, back.run).filter(polars.col("step") > 0)
    judged = what_if(record(from_operations(rows)))
    assert judged.simulator_error < 1e-3
    assert judged.slowdown > 1.2
    assert max(judged.worker_slowdown, key=lambda rank: judged.worker_slowdown[rank]) == 1


def test_an_iteration_is_a_trace_that_opentelemetry_reads(run: Run, tmp_path: Path) -> None:
    lines = exported(run, "otlp", tmp_path / "run.jsonl").read_text().splitlines()
    assert len(lines) == 6
    taken = 0
    for number, line in enumerate(lines):
        # Protobuf's own JSON has bytes in base64, where OTLP says hexadecimal.
        in_base64 = re.sub(r'(Id":)"([0-9a-f]+)"', lambda id: f'{id[1]}"{b64encode(bytes.fromhex(id[2])).decode()}"', line)
        request = json_format.Parse(in_base64, ExportTraceServiceRequest())
        spans = {span.span_id: span for of in request.resource_spans for scope in of.scope_spans for span in scope.spans}
        (root,) = [span for span in spans.values() if not span.parent_span_id]
        assert (root.name, len(root.trace_id), {span.trace_id for span in spans.values()}) == (
            f"iteration {number}", 16, {root.trace_id}
        )  # fmt: skip
        for span in spans.values():
            above = spans.get(span.parent_span_id, span)
            assert above.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= above.end_time_unix_nano
        assert sum(span.parent_span_id == root.span_id for span in spans.values()) == 4
        taken += len(spans) - 5
    (count,) = run.sql("select count(*) as n, min(iteration) as first from spans where run = $run")
    assert taken == count["n"]
    assert abs(root.end_time_unix_nano / 1e9 - time.time()) < 600, "a time of day"


def test_perfetto_bars_nest_or_follow_and_every_message_has_an_arrow(run: Run, tmp_path: Path) -> None:
    trace = json.loads(exported(run, "perfetto", tmp_path / "p.json").read_text())["traceEvents"]
    bars: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            bars[event["pid"], event["tid"]].append(event)
    assert all({"iteration", "epoch"} <= bar["args"].keys() for track in bars.values() for bar in track)
    for track in bars.values():
        ordered = sorted(track, key=lambda bar: bar["ts"])
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(ordered))
    spans = run.sql("select count(*) as n, count(*) filter (where kind = 'recv') as received from spans where run = $run")[0]
    assert sum(map(len, bars.values())) == spans["n"]
    assert sum(event["ph"] == "s" for event in trace) == sum(event["ph"] == "f" for event in trace) == spans["received"]
    names = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert names == {f"rank {rank}" for rank in range(4)}
    for arrow in (event for event in trace if event["ph"] in "sf"):
        on = [bar for bar in bars[arrow["pid"], arrow["tid"]] if bar["ts"] <= arrow["ts"] < bar["ts"] + max(1, bar["dur"])]
        assert len(on) == 1, "a viewer would tie the arrow to no bar, or to another"


def test_parquet_holds_every_view_and_never_overwrites(run: Run, tmp_path: Path) -> None:
    folder = exported(run, "parquet", tmp_path / "tables")
    spans = polars.read_parquet(folder / "spans.parquet")
    assert spans.height == run.sql("select count(*) as n from spans where run = $run")[0]["n"]
    assert {"runs", "iterations", "spans", "verdicts", "plans", "events"} <= {file.stem for file in folder.iterdir()}
    refused = export(run, "parquet", "--out", str(folder))
    assert refused.exit_code == 2
    assert "exists already" in refused.output


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "run"}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def test_prometheus_text_says_what_the_views_say(run: Run, tmp_path: Path) -> None:
    found = samples(exported(run, "prometheus", tmp_path / "run.prom").read_text())
    last = run.sql("select iteration_us, loss from iterations where run = $run order by iteration desc limit 1")[0]
    assert found["unskew_iteration_seconds", ()] == last["iteration_us"] / 1e6
    assert found["unskew_loss", ()] == last["loss"]
    assert found["unskew_iterations", ()] == 6
    assert found["unskew_run_up", ()] == 0
    assert found["unskew_devices", (("state", "joined"),)] == 4


def test_a_run_that_was_killed_is_not_up(tmp_path: Path) -> None:
    store = Store.locate(tmp_path / "store")
    started = RunStarted(run="killed", device="cpu", clock="host", mode="observe", ranks=1, options={}, code="", version="0")
    stream = ControlStream(store, "killed", "run/killed", "controller")
    stream.append(0, [started], actor="controller")
    stream.close()
    (tmp_path / "other").mkdir()
    link = tmp_path / "link.prom"
    link.symlink_to(tmp_path / "other" / "run.prom")
    take_out(store, "prometheus", "killed", link)
    up = [samples((tmp_path / "other" / "run.prom").read_text())["unskew_run_up", ()]]
    with hold_controller_lock(store, "killed"):
        take_out(store, "prometheus", "killed", link)
        up.append(samples((tmp_path / "other" / "run.prom").read_text())["unskew_run_up", ()])
    assert up == [0, 1]
    assert link.is_symlink()


def test_the_endpoint_answers_scrapes_on_loopback(run: Run) -> None:
    command = [sys.executable, "-m", "unskew", "export", "prometheus", run.id, "--serve", "0", "--store", str(run.store.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            address = re.search(r"http://127\.0\.0\.1:\d+/metrics", line)
            assert address, line
            for _ in range(2):
                with urllib.request.urlopen(address[0], timeout=30) as answer:
                    assert samples(answer.read().decode())["unskew_iterations", ()] == 6
            server.send_signal(signal.SIGINT)
            assert server.wait(30) == 0
        finally:
            server.kill()


INTERRUPTED = """
import os, signal, sys
from unskew.collector.formats.exporters import prometheus
from unskew.collector.paths import Store
from unskew.commands.log.export import answer_scrapes
made = prometheus.RunCollector.collect
def interrupted(self):
    os.kill(os.getpid(), signal.SIGINT)
    yield from made(self)
prometheus.RunCollector.collect = interrupted
answer_scrapes(Store.locate(sys.argv[1]), sys.argv[2], 0)
"""


def test_the_endpoint_ends_where_ctrl_c_comes_during_a_scrape(run: Run) -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(run.store.root), run.id]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://127\.0\.0\.1:\d+/metrics", server.stdout.readline())
            assert address
            with urllib.request.urlopen(address[0], timeout=30) as answer:
                assert samples(answer.read().decode())["unskew_iterations", ()] == 6
            assert server.wait(30) == 0
        finally:
            server.kill()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("csv", "--out", "x"), "FORMAT csv is not known"),
        (("perfetto",), "--out PATH is needed"),
        (("perfetto", "--out", "no/such/folder/x.json"), "there is no folder"),
        (("perfetto", "--serve", "0"), "--serve PORT goes with prometheus"),
    ],
)
def test_bad_requests_are_refused(run: Run, arguments: tuple[str, ...], sentence: str) -> None:
    refused = export(run, *arguments)
    assert refused.exit_code == 2
    assert sentence in refused.output


def test_a_run_without_chunks_has_no_straggler_trace(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("step,seconds\n1,1\n")
    store = Store.locate(tmp_path / "store")
    (stored,) = bring_in(store, "iteration-times", tmp_path / "t.csv")
    arguments = ["export", "straggler-analysis", stored.run, "--out", str(tmp_path / "x"), "--store", str(store.root)]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "has no chunks under a plan" in refused.output
    assert not (tmp_path / "x").exists()

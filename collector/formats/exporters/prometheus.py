"""A run's state of now as Prometheus metrics: a text file (node exporter's textfile collector) or an endpoint on loopback.

Everything is a gauge read from the views at the moment of asking; a scrape of a run that has ended gives its last state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock, Thread
from typing import NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from unskew.collector.read.reader import Reader
from unskew.collector.write.commands import controller_alive


class _Gauge(NamedTuple):
    """`query` gives a row per sample: the values of `labels`, then the sample's.

    `$run` is the run; `$alive`, whether its controller lives.
    """

    name: str
    help: str
    query: str
    labels: tuple[str, ...] = ()


_LOOK_S = 0.2
_LAST_JUDGED = "(select max(iteration) from judged where run = $run)"
_GAUGES = (
    _Gauge(
        "unskew_run_up",
        "1 while the run goes on, 0 when it has ended or been killed",
        "select (status = 'unfinished' and $alive)::int from runs where run = $run",
    ),
    _Gauge("unskew_iterations", "Iterations committed", "select iterations from runs where run = $run"),
    _Gauge(
        "unskew_iteration_seconds",
        "The last iteration's time",
        "select iteration_us / 1e6 from iterations where run = $run order by iteration desc limit 1",
    ),
    _Gauge(
        "unskew_iteration_predicted_seconds",
        "The last predicted iteration's time as predicted",
        "select arg_max(predicted_us, iteration) / 1e6 from iterations where run = $run and predicted_us is not null",
    ),
    _Gauge(
        "unskew_loss",
        "The last iteration's loss, nats per token",
        "select arg_max(loss, iteration) from iterations where run = $run and loss is not null",
    ),
    _Gauge("unskew_tokens", "Target tokens trained on", "select sum(tokens) from iterations where run = $run"),
    _Gauge(
        "unskew_devices",
        "Devices by state",
        "select state, count(*) from devices where run = $run group by state order by state",
        ("state",),
    ),
    _Gauge(
        "unskew_heartbeat_timestamp_seconds",
        "Wall clock of the rank's last heartbeat in the log",
        "select rank, max(at_us) / 1e6 from heartbeats where run = $run group by rank order by rank",
        ("rank",),
    ),
    _Gauge(
        "unskew_time_ratio",
        "A rank's chunk times over the prediction for a healthy device, last judged iteration",
        f"unpivot (select rank, f, b, w from judged where run = $run and iteration = {_LAST_JUDGED} order by rank) "
        "on f, b, w into name kind value ratio",
        ("rank", "kind"),
    ),
    _Gauge(
        "unskew_open_verdicts",
        "Open verdicts by cause",
        "select cause, count(*) from verdicts where run = $run and until_iteration is null group by cause order by cause",
        ("cause",),
    ),
    _Gauge(
        "unskew_open_proposals",
        "Proposals that wait for a decision",
        "select count(*) from proposals where run = $run and status = 'open'",
    ),
    _Gauge(
        "unskew_dropped_events",
        "Events that full buffers discarded",
        "select coalesce(sum((payload->>'count')::bigint), 0) from events where run = $run and type = 'dropped@1'",
    ),
)


class RunCollector(Collector):
    """The gauges of one run. Scrapes are served one after another: a reader is not for two threads."""

    def __init__(self, reader: Reader, run: str) -> None:
        self._reader, self._run, self._lock = reader, run, Lock()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        with self._lock:
            alive = controller_alive(self._reader._store, self._run)
            self._reader.refresh()
            for gauge in _GAUGES:
                family = GaugeMetricFamily(gauge.name, gauge.help, labels=("run", *gauge.labels))
                known: dict[str, object] = {"run": self._run, "alive": alive}
                params = {name: value for name, value in known.items() if f"${name}" in gauge.query}
                for *of, value in self._reader.sql(gauge.query, params).iter_rows():
                    if value is not None:
                        family.add_metric([self._run, *map(str, of)], float(value))
                yield family


def registry(reader: Reader, run: str) -> CollectorRegistry:
    """A registry that holds the run's gauges and nothing of this process."""
    found = CollectorRegistry(auto_describe=False)
    found.register(RunCollector(reader, run))
    return found


def write(reader: Reader, run: str, path: Path) -> str:
    """Write the text format; returns a sentence on what is in it."""
    text = generate_latest(registry(reader, run))
    path.write_bytes(text)
    samples = sum(not line.startswith(b"#") for line in text.splitlines())
    return f"{samples} samples"


def serve(reader: Reader, run: str, port: int, ready: Callable[[int], None]) -> None:
    """Answer scrapes on loopback until interrupted; `ready` gets the port (0 chooses a free one). Raises `OSError`."""
    with make_server("127.0.0.1", port, make_wsgi_app(registry(reader, run)), WSGIServer, _Quiet) as server:
        # In a thread of its own: wsgiref takes whatever is raised in a request for the application's fault, a Ctrl-C too.
        answering = Thread(target=server.serve_forever, name="scrapes", daemon=True)
        answering.start()
        try:
            ready(server.server_port)
            while answering.is_alive():  # a signal that another thread was given does not end a wait of this one
                answering.join(_LOOK_S)
        finally:
            server.shutdown()


class _Quiet(WSGIRequestHandler):
    """Says nothing about each scrape."""

    def log_message(self, format: str, *args: object) -> None:
        pass

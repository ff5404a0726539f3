"""How peers and scaling evaluate runs: cores taken, figures, ratios to the best peer, bounds, and continued sittings."""

import argparse
import contextlib
import io

import pytest
from rich.console import Console

from benchmarks import peers, records
from benchmarks.counting import Load, Served
from benchmarks.served import ServedError, Server, cores_taken, figures
from tests.benchmarks.test_counting import CONFIG

RUN = {"ttft": 100.0, "tpot": 10.0, "output": 50.0, "total": 90.0, "memory": 1000.0, "taken": 0.5, "engines": 1, "cores": 2}
RATES = {"class": "float16", "weight_bytes": 1000, "rates": {"1": 1e9, "128": 1e9}, "bandwidth": 1e9, "shared_bandwidth": 1e9}


def text_of(table):
    console = Console(width=300, file=io.StringIO())
    console.print(table)
    return console.file.getvalue()


def test_cores_taken_are_those_of_the_run_alone():
    samples = [(0.0, 0.0), (1.0, 8.0), (2.0, 8.5), (3.0, 9.0), (4.0, 20.0)]
    assert cores_taken(samples, 1.0, 3.0) == pytest.approx(0.5)
    assert cores_taken(samples, 1.5, 2.5) == pytest.approx(0.5)


def test_figures_are_computed_from_the_generators_results():
    run = {"median_ttft_ms": 7.0, "itls": [[0.1, 0.2], [0.2, 0.4], [0.9, 0.9]], "duration": 2.0, "total_input_tokens": 30}
    assert figures(Load(1, 3, 10, 4), run) == pytest.approx({"ttft": 7.0, "tpot": 200.0, "output": 6.0, "total": 21.0})


def test_every_load_and_round_has_a_seed_of_its_own():
    seeds = [peers.seed_of(work, number) for work in peers.LOADS for number in range(1, 100)]
    assert len(set(seeds)) == len(seeds)


def test_ratios_name_the_best_peer_of_each_figure():
    table = peers.compare(
        "W1",
        {
            "swift": [{**RUN, "ttft": 50.0, "options": None}],
            "small": [{**RUN, "memory": 500.0, "output": 10.0, "options": None}],
            "headrace": [{**RUN, "options": ""}, {**RUN, "output": 100.0, "options": ""}],
        },
    )
    (line,) = [line for line in text_of(table).splitlines() if "headrace" in line]
    assert "100.0 (0.50x swift)" in line and "75.0 (1.50x swift)" in line and "1,000.0 (0.50x small)" in line


def test_shares_of_a_bound_are_below_one_for_times_and_rates():
    best = Served(ttft=50.0, tpot=5.0, output=100.0, total=180.0)
    assert peers.beside("ttft", 100.0, best) == (50.0, 0.5)
    assert peers.beside("output", 50.0, best) == (100.0, 0.5)


def test_bounds_stand_beside_headrace_on_the_cores_left_and_one_stream_on_one_core_too():
    runs = {work: {"headrace": [{**RUN, "options": ""}], "peer": [{**RUN, "options": None}]} for work in ("W1", "W2")}
    text = text_of(peers.beside_bounds(runs, {"": RATES}, CONFIG))
    assert "peer" not in text.replace("peers", "")
    lines = [line.split("│")[1:-1] for line in text.splitlines() if "│" in line]
    assert [(row[1].strip(), row[2].strip(), row[6].strip()) for row in lines] == [
        ("W1", "TTFT p50 ms", "1.50"), ("W1", "TPOT p50 ms", "1.50"), ("W1", "TTFT p50 ms", "1.00"), ("W1", "TPOT p50 ms", "1.00"),
        ("W2", "output tok/s", "1.50"),
    ]  # fmt: skip


def test_a_sitting_goes_on_where_it_ended_and_past_a_server_that_fails(tmp_path, monkeypatch):
    out = tmp_path / "runs" / "sitting.jsonl"
    started, measured = [], []

    @contextlib.contextmanager
    def running(server):
        if server.name == "broken":
            raise ServedError("it does not start")
        started.append(server.name)
        yield server

    def put_under(load, server, at, tokenizer, generator, seed):
        if load is not peers.LOADS["warm"]:
            measured.append((server.name, seed))
        return RUN

    monkeypatch.setattr(peers, "running", running)
    monkeypatch.setattr(peers, "put_under", put_under)
    servers = [Server("broken", []), Server("headrace", [], options="")]
    options = argparse.Namespace(peers_dir=tmp_path, model="smollm2", out=out, works=["W1"], rounds=1)
    sitting = peers.Sitting(options)
    sitting.run(servers)
    assert measured == [("headrace", peers.seed_of("W1", 1))] and len(sitting.failures) == 1
    with out.open("a") as file:
        file.write('{"kind": "run", "round": 2, "ser')  # cut off as it was written
    options.works, options.rounds = ["W1", "W2"], 2
    measured.clear()
    peers.Sitting(options).run(servers[1:])
    assert [seed for _, seed in measured] == [peers.seed_of("W2", 1), peers.seed_of("W1", 2), peers.seed_of("W2", 2)]
    assert len(records.read(out, "run")) == 4
    measured.clear()
    peers.Sitting(options).run(servers[1:])
    assert not measured and started == ["headrace"] * 3


def test_the_numeric_class_is_read_out_of_headraces_options(tmp_path, monkeypatch):
    commands = []

    class Answer:
        stdout = "{}"

    monkeypatch.setattr(peers.subprocess, "run", lambda command, **more: commands.append(command) or Answer)
    peers.rates_of(tmp_path, "--max-num-seqs 4 --quantization int8 --dtype=float16")
    assert commands[0][-2:] == ["--dtype=float16", "--quantization=int8"]

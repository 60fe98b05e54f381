import gzip
import io
import json
import logging

import numpy as np
import pytest

from brorl_jax import metrics, progress
from brorl_jax.metrics import MetricLogger, PhaseTimer, RolloutWriter, plain, read_jsonl, rss_gib
from brorl_jax.types import Finish, Group, Prompt, Sample, Status

HOSTILE = 'a</script><!--<script>"\\\n\t\x00\x1b[31m\u2028\u2029é漢😀\ud800 \udc00'
SAFE = HOSTILE.replace("\ud800", "\ufffd").replace("\udc00", "\ufffd")


def steps(path):
    return [row["step"] for row in read_jsonl(path)[0]]


def rollout_rows(path):
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def make_group(key="p", text="out"):
    prompt = Prompt(f"src/{key}", np.arange(3, dtype=np.int32), "2+2=", "007", "numeric", "src")
    logp = np.array([-1.0, -2.0, -6.0], np.float32)
    good = Sample(
        0, 2**62 + 1, np.arange(3, dtype=np.int32), logp, Finish.STOP, 4, text, Status.OK, 1.0, 0.9, np.float32(0.5)
    )
    lost = Sample(1, 7, np.zeros(0, np.int32), np.zeros(0, np.float32), Finish.ABORT, 4, "", Status.ABORTED)
    return Group(prompt, [good, lost])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(1.5), 1.5),
        (np.array(2.0), 2.0),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (float("nan"), None),
        (np.float32("inf"), None),
        (HOSTILE, SAFE),
        ("\ud83d\ude00", "😀"),
        (None, None),
    ],
)
def test_plain_values(value, expected):
    assert plain(value) == expected and type(plain(value)) is type(expected)


def test_what_is_measured_late_joins_the_last_row(tmp_path):
    with MetricLogger(tmp_path) as logger:
        for step in (1, 2):
            logger.write(step, {"a": step})
    with MetricLogger(tmp_path) as logger:
        logger.amend(1, {"b": 0})  # not the last one: left alone
        logger.amend(2, {"b": np.float32(0.5), "c": float("nan")})
        logger.write(3, {"a": 3})
    rows = [{k: v for k, v in row.items() if k != "time"} for row in read_jsonl(tmp_path / "metrics.jsonl")[0]]
    assert rows == [{"step": 1, "a": 1}, {"step": 2, "a": 2, "b": 0.5, "c": None}, {"step": 3, "a": 3}]


@pytest.mark.parametrize("value", [np.zeros(2), [1], {"a": 1}, object()])
def test_a_metric_that_is_no_scalar_is_refused(value, tmp_path):
    with MetricLogger(tmp_path) as logger, pytest.raises(TypeError, match="must be one number"):
        logger.write(1, {"x": value})
    assert steps(tmp_path / "metrics.jsonl") == []


def test_lines_are_on_disk_as_soon_as_written_and_strictly_json(tmp_path):
    logger = MetricLogger(tmp_path)
    logger.write(0, {"eval/pass@1": np.float32(0.5)})
    logger.write(3, {"loss/total": float("nan")})
    rows = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "metrics.jsonl").open()]
    assert [(r["step"], r.get("eval/pass@1"), r.get("loss/total")) for r in rows] == [(0, 0.5, None), (3, None, None)]
    assert rows[0]["time"] <= rows[1]["time"]
    logger.close()


def test_steps_only_go_forward(tmp_path):
    with MetricLogger(tmp_path) as logger:
        logger.write(5, {})
        for step in (5, 4):
            with pytest.raises(ValueError, match=rf"step {step} does not follow step 5.*truncate_after\({step - 1}\)"):
                logger.write(step, {})
    with MetricLogger(tmp_path) as again, pytest.raises(ValueError, match="does not follow step 5"):
        again.write(5, {})


def test_resume_sets_later_lines_aside_and_keeps_them(tmp_path):
    with MetricLogger(tmp_path) as logger:
        for step in range(1, 8):
            logger.write(step, {"x": step})
    with MetricLogger(tmp_path) as logger:
        assert logger.truncate_after(5) == 2
        for step in (6, 7, 8):
            logger.write(step, {"x": 10 * step})
    rows, torn = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["x"]) for r in rows] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 60), (7, 70), (8, 80)]
    assert torn == []
    assert [r["x"] for r in read_jsonl(tmp_path / "metrics.superseded.jsonl")[0]] == [6, 7]


@pytest.mark.parametrize(
    ("tail", "kept", "aside"),
    [
        ('{"step": 2, "x', [1], [{"torn": '{"step": 2, "x'}]),  # killed in mid-write
        ('{"step": 2}', [1, 2], []),  # killed between the object and its newline
        ('{"step": 1}\n', [1], [{"step": 1}]),  # the same step twice: the first stays
        ("\x00\x00\x00", [1], [{"torn": "\x00\x00\x00"}]),  # a file system that lost the last block
    ],
)
def test_a_torn_tail_is_set_aside_and_writing_goes_on(tmp_path, tail, kept, aside):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + tail)
    with MetricLogger(tmp_path) as logger:
        logger.write(3, {})
    assert steps(tmp_path / "metrics.jsonl") == [*kept, 3]
    assert read_jsonl(tmp_path / "metrics.superseded.jsonl")[0] == aside


class Broken:
    """A backend of which the named call, or every call, raises."""

    def __init__(self, at):
        self.at, self.calls = at, []
        self._maybe("construct")

    def _maybe(self, call):
        self.calls.append(call)
        if self.at in (call, "every"):
            raise ConnectionError("tracking server is down")

    def write(self, step, row):
        self._maybe("write")

    def truncate_after(self, step):
        self._maybe("truncate")

    def close(self):
        self._maybe("close")


@pytest.mark.parametrize("at", ["construct", "write", "truncate", "close", "every"])
def test_a_failing_backend_never_hurts_and_warns_once(tmp_path, monkeypatch, caplog, at):
    monkeypatch.setattr(metrics, "TensorBoard", lambda *a: Broken(at))
    healthy = Broken("never")
    monkeypatch.setattr(metrics, "WandB", lambda *a: healthy)
    with caplog.at_level(logging.WARNING), MetricLogger(tmp_path, tensorboard=True, wandb_project="p") as logger:
        logger.write(1, {"x": 1})
        logger.write(2, {"x": 1})
        logger.truncate_after(1)
        logger.write(2, {"x": 2})
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]
    assert healthy.calls == ["construct", "write", "write", "truncate", "write", "close"]
    assert [("TensorBoard" in r.message, "tracking server is down" in r.message) for r in caplog.records] == [
        (True, True)
    ]


def test_tensorboard_events_can_be_read_back(tmp_path, caplog):
    pytest.importorskip("tensorboardX")
    with MetricLogger(tmp_path, tensorboard=True) as logger:
        logger.write(1, {"reward/mean": 0.25, "note": "text is skipped"})
        logger.truncate_after(0)
        logger.write(1, {"reward/mean": 0.5})
    data = b"".join(p.read_bytes() for p in (tmp_path / "tensorboard" / "metrics").iterdir())
    assert data.count(b"reward/mean") == 2 and not caplog.records


def test_rollouts_round_trip_through_gzip(tmp_path):
    path = RolloutWriter(tmp_path, "all").write(10, [(make_group(text=HOSTILE), "trained"), (make_group("q"), "all 1")])
    assert path == tmp_path / "rollouts" / "step_000010.jsonl.gz"
    assert list(path.parent.iterdir()) == [path]
    rows = rollout_rows(path)
    assert rows[0] == {
        "step": 10,
        "prompt_id": "src/p",
        "source": "src",
        "verifier": "numeric",
        "prompt": "2+2=",
        "gold": "007",
        "sample": 0,
        "seed": 2**62 + 1,
        "response": SAFE,
        "n_tokens": 3,
        "finish": "stop",
        "status": "ok",
        "reward": 1.0,
        "shaped_reward": 0.9,
        "advantage": 0.5,
        "mean_logp": -3.0,
        "weight_version": 4,
        "outcome": "trained",
    }
    assert [r["outcome"] for r in rows] == ["trained", "excluded: aborted", "all 1", "all 1"]
    assert rows[1]["reward"] is None and rows[1]["mean_logp"] is None


def test_rollouts_can_be_read_with_pandas(tmp_path):
    pandas = pytest.importorskip("pandas")
    path = RolloutWriter(tmp_path, "all").write(3, [(make_group(text=HOSTILE), "trained")])
    frame = pandas.read_json(path, lines=True, dtype={"gold": str, "response": str})
    assert frame.response[0] == SAFE and frame.gold[0] == "007" and frame.seed[0] == 2**62 + 1
    assert np.isnan(frame.reward[1])


@pytest.mark.parametrize(("mode", "expected"), [("all", 6), (True, 6), (1, 2), (2, 4), ("2", 4), (9, 6)])
def test_rollout_mode_is_a_number_of_groups(tmp_path, mode, expected):
    groups = ((make_group(str(k)), "trained") for k in range(3))
    path = RolloutWriter(tmp_path, mode).write(1, groups)
    assert len(rollout_rows(path)) == expected


@pytest.mark.parametrize("mode", ["none", False, 0])
def test_no_rollouts_leave_no_folder(tmp_path, mode):
    assert RolloutWriter(tmp_path, mode).write(1, [(make_group(), "trained")]) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["some", -1, 1.5, None])
def test_other_rollout_modes_are_refused(tmp_path, mode):
    with pytest.raises(ValueError, match=r"log\.rollouts must be"):
        RolloutWriter(tmp_path, mode)


def test_a_rollout_file_appears_whole_or_not_at_all(tmp_path):
    writer = RolloutWriter(tmp_path, "all")
    writer.write(1, [(make_group(text="first"), "trained")])

    def killed():
        yield make_group(text="second"), "trained"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write(1, killed())
    assert rollout_rows(tmp_path / "rollouts/step_000001.jsonl.gz")[0]["response"] == "first"


def test_rollouts_beyond_the_checkpoint_are_set_aside_each_time(tmp_path):
    writer = RolloutWriter(tmp_path, "all")
    for expected in (1, 2):
        for step in (1, 2):
            writer.write(step, [(make_group(), "trained")])
        assert writer.truncate_after(1) == 1
        assert [p.name for p in writer.directory.glob("*.gz")] == ["step_000001.jsonl.gz"]
        assert len(list((writer.directory / "superseded").iterdir())) == expected


def test_files_of_other_names_stay_where_they_are(tmp_path):
    writer = RolloutWriter(tmp_path, "all")
    (tmp_path / "rollouts").mkdir()
    names = [tmp_path / "rollouts" / f"step_{name}.jsonl.gz" for name in ("000002", "of_mine")]
    for path in names:
        path.touch()
    assert writer.truncate_after(1) == 1
    assert [path.exists() for path in names] == [False, True]


def test_phase_timer_sums_phases_and_starts_anew():
    ticks = iter([0.0, 1.0, 3.0, 4.0, 9.0, 10.0, 10.5, 11.0, 12.0])
    timer = PhaseTimer(clock=lambda: next(ticks))
    with timer("rollout"):
        pass
    with pytest.raises(RuntimeError), timer("rollout"):
        raise RuntimeError
    assert timer.pop() == {"time/rollout_s": 2.0 + 5.0, "time/step_s": 10.0}
    with timer("eval"):
        pass
    assert timer.pop() == {"time/eval_s": 0.5, "time/step_s": 2.0}


def test_rss_grows_with_a_touched_array():
    before = rss_gib()
    block = np.ones(2**26, np.uint8)
    assert 0.05 < rss_gib() - before < 0.08 and block.all()


def test_progress_prints_one_plain_line_per_step():
    out, ticks = io.StringIO(), iter([0.0, 100.0, 102.0, 104.0])
    with progress.Progress(400, start=1, stream=out, clock=lambda: next(ticks)) as display:
        display.update(2, {"reward/mean": 0.5, "groups/pass_rate": 0.25, "eval/pass@1": 0.125})
        display.note("starved at step 2")
        display.update(3, {"reward/mean": None, "throughput/tokens_per_s": 1234.5})
        display.update(4, {"loss/total": 1.0})
    assert out.getvalue().splitlines() == [
        "train   2/400  reward 0.500  mixed groups 25%  held-out pass@1 12.5%  11:03:20 left",
        "starved at step 2",
        "train   3/400  reward 0.500  mixed groups 25%  held-out pass@1 12.5%  tokens/s 1,234  5:37:27 left",
        "train   4/400  reward 0.500  mixed groups 25%  held-out pass@1 12.5%  tokens/s 1,234  13:12 left",
    ]


def test_progress_of_the_warm_start_can_be_sparse():
    out = io.StringIO()
    with progress.Progress(
        5, title="warm-up", fields=progress.WARMUP, every=2, stream=out, clock=lambda: 0.0
    ) as display:
        for step in range(1, 6):
            display.update(step, {"warmup/loss": 1 / step})
    assert out.getvalue().splitlines() == [
        "warm-up 2/5  loss 0.5000  0:00 left",
        "warm-up 4/5  loss 0.2500  0:00 left",
        "warm-up 5/5  loss 0.2000  done",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_live_in_a_terminal(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    out = Terminal()
    with progress.Progress(2, stream=out) as display:
        display.update(1, {"reward/mean": 0.5})
        display.note("[not markup]")
        display.update(2, {"reward/mean": 0.75})
    assert "reward 0.750" in out.getvalue() and "2/2" in out.getvalue() and "[not markup]" in out.getvalue()


def test_a_closed_terminal_does_not_end_the_run(caplog):
    out = io.StringIO()
    out.close()

    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with caplog.at_level(logging.WARNING), progress.Progress(2, stream=Gone()) as display:
        display.update(1, {"reward/mean": 0.5})
        display.update(2, {"reward/mean": 0.5})
    assert len(caplog.records) == 1
    with progress.Progress(2, stream=out) as display:  # isatty itself raises
        display.update(1, {})

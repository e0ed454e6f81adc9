"""A run becomes a named node only when its rows are one machine's, one code's, and don't contradict themselves."""

import dataclasses

import pytest
import synthetic
from typer.testing import CliRunner

from m3cp import cli, frames, recording, records

FACTS = {"code_hash": "abc123def456", "commit": "c0ffee", "dirty": False}


@pytest.fixture(scope="module")
def good():
    return [
        dataclasses.replace(row, provenance=FACTS) for row in synthetic.rows(contexts=(8192, 32_768), batches=(1, 8))
    ]


@pytest.fixture
def root(tmp_path, good):
    """A repository with one local run of good rows, `mine`."""
    write(tmp_path, good)
    return tmp_path


def write(root, rows, run="mine"):
    folder = root / "data" / "runs" / run
    for row in rows:
        records.append(folder, row)
    return folder


def with_first(rows, **changes):
    return [dataclasses.replace(rows[0], **changes), *rows[1:]]


def test_a_recorded_run_is_found_by_its_name_and_called_recorded(root, good):
    said = "\n".join(recording.record("mine", "two-gpus", root=root))
    assert records.load(root / "data" / "measured" / "two-gpus") == good
    loaded = frames.load_run("two-gpus", root)
    assert loaded.source == "recorded" and len(loaded.frame) == len(good)
    assert "8 rows (8 ok)" in said and "P = 2" in said and "m3cp report --node two-gpus" in said
    assert "unsteady" not in said and "uncommitted" not in said


def test_every_drivers_rows_are_recorded(tmp_path, good):
    for name, rows in (("rows.first.jsonl", good[:3]), ("rows.second.jsonl", good[3:])):
        for row in rows:
            records.append(tmp_path / "data" / "runs" / "many" / name, row)
    recording.record("many", "node", root=tmp_path)
    assert records.load(tmp_path / "data" / "measured" / "node") == good


def test_what_a_reader_should_know_is_said(root, good):
    rows = [
        dataclasses.replace(r, unsteady=True, provenance={**FACTS, "dirty": None}) for r in good if r.point.arm == "tp"
    ]
    write(root, rows, "odd")
    said = "\n".join(recording.record("odd", "odd-node", root=root))
    assert "4 of 4 timed rows are unsteady" in said and "not known" in said and "no CP row" in said


def test_a_torn_line_and_a_failed_point_are_no_obstacle(root, good):
    failed = dataclasses.replace(
        good[0], status="failed", samples_us=[], rank_samples_us=[], check={}, error="out of memory"
    )
    folder = write(root, [failed])
    with open(folder / records.ROWS_FILE, "a") as file:
        file.write('{"point": {"context_tok')
    recording.record("mine", "node", root=root)
    text = (root / "data" / "measured" / "node" / records.ROWS_FILE).read_text()
    assert text.endswith("}\n") and len(text.splitlines()) == len(good) + 1
    assert len(records.load(folder)) == len(good) + 1  # the run itself is as it was, torn line and all
    assert (folder / records.ROWS_FILE).read_text().endswith('{"context_tok')


def wrong(row):
    return dict(
        status="failed",
        samples_us=[],
        rank_samples_us=[],
        check={"passed": False, "mismatches": 3},
        error="3 rows differ",
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda r: dict(node="4x MI355X"), r"several machines: 4x MI355X \(1 rows\), synthetic 2x H200 \(7 rows\)"),
        (lambda r: dict(provenance={**FACTS, "code_hash": "other"}), r"several code versions \(code_hash\): other \(1 rows\), abc123def456"),
        (lambda r: dict(provenance={**FACTS, "dirty": True}), "1 rows were measured with uncommitted changes"),
        (lambda r: dict(provenance={}), "1 rows do not say which code"),
        (wrong, "1 rows failed their check of the ids, first tp/staged 8k x1 P=2 cold: 3 rows differ"),
        (lambda r: dict(samples_us=[*r.samples_us[:-1], -1.0]), "no positive number"),
        (lambda r: dict(rank_samples_us=r.rank_samples_us[:1]), "samples of 1 ranks, the row says ranks=2"),
        (lambda r: dict(rank_samples_us=[r.rank_samples_us[0], [2 * v for v in r.samples_us]]), "not the slowest rank's"),
        (lambda r: dict(footprint_over_llc=1.2), "called cold, but its footprint is 1.2 last-level caches"),
        (lambda r: dict(extra={"datasheet_gbs": 10.0}), "GB/s, the memory's data sheet says 10"),
    ],
)  # fmt: skip
def test_rows_that_are_no_record_are_refused_in_words(tmp_path, good, spoil, words):
    write(tmp_path, with_first(good, **spoil(good[0])))
    with pytest.raises(ValueError, match=words):
        recording.record("mine", "node", root=tmp_path)
    assert not (tmp_path / "data" / "measured").exists()


def test_every_reason_is_given_at_once(tmp_path, good):
    rows = [dataclasses.replace(r, provenance={**FACTS, "dirty": True}, footprint_over_llc=0.5) for r in good]
    write(tmp_path, with_first(rows, node="another"))
    with pytest.raises(ValueError) as refused:
        recording.record("mine", "node", root=tmp_path)
    text = str(refused.value)
    assert "several machines" in text and "uncommitted" in text and "and 5 more rows like these" in text


def test_nothing_is_overwritten_without_being_told_to(root, good):
    recording.record("mine", "node", root=root)
    target = root / "data" / "measured" / "node"
    (target / "policy_cp.json").write_text("{}")
    write(root, good[:4], "newer")
    with pytest.raises(ValueError, match="8 rows of synthetic 2x H200 are recorded there.*--overwrite"):
        recording.record("newer", "node", root=root)
    assert records.load(target) == good and (target / "policy_cp.json").exists()
    said = "\n".join(recording.record("newer", "node", overwrite=True, root=root))
    assert records.load(target) == good[:4]
    assert not (target / "policy_cp.json").exists() and "removed policy_cp.json" in said
    assert sorted(p.name for p in target.iterdir()) == [records.ROWS_FILE]


@pytest.mark.parametrize("name", ["", "Two GPUs", "../out", "a/b", ".hidden", "x" * 65])
def test_a_name_that_is_no_folder_is_refused(root, name):
    with pytest.raises(ValueError, match="--as=.*small letters"):
        recording.record("mine", name, root=root)


def test_a_node_is_not_recorded_over_itself(root):
    recording.record("mine", "node", root=root)
    with pytest.raises(ValueError, match="is this recorded node itself"):
        recording.record(str(root / "data" / "measured" / "node"), "node", overwrite=True, root=root)


def test_the_recorded_nodes_would_be_recorded_again():
    """What is committed under data/measured passes what is asked of a user's run."""
    nodes = sorted((frames.ROOT / "data" / "measured").glob(f"*/{records.ROWS_FILE}"))
    assert nodes
    for path in nodes:
        rows = records.load(path)
        if records.committed_hash(rows[0].provenance["commit"]) is None:  # no history here to ask
            rows = [dataclasses.replace(r, provenance={**r.provenance, "dirty": None}) for r in rows]
        assert recording.objections(rows) == [], path


def test_changes_beside_the_measuring_path_do_not_count(root, good, monkeypatch):
    """A row says dirty; the commit that it names holds the very code that measured it."""
    write(root, [dataclasses.replace(r, provenance={**FACTS, "dirty": True}) for r in good], "beside")
    monkeypatch.setattr(recording, "_committed_hash", {FACTS["commit"]: "another"}.get)
    with pytest.raises(ValueError, match="8 rows were measured with uncommitted changes"):
        recording.record("beside", "node", root=root)
    monkeypatch.setattr(recording, "_committed_hash", {FACTS["commit"]: FACTS["code_hash"]}.get)
    recording.record("beside", "node", root=root)


def test_the_command_refuses_in_words(tmp_path):
    done = CliRunner().invoke(cli.app, ["record", str(tmp_path / "nothing"), "--as", "node"], prog_name="m3cp")
    assert done.exit_code == 1 and "m3cp record:" in done.output and "Traceback" not in done.output
    done = CliRunner().invoke(cli.app, ["record", "x"], prog_name="m3cp")
    assert done.exit_code == 2 and "--as" in done.output


def test_rows_that_were_skipped_do_not_keep_a_run_from_being_recorded(root, good):
    """A sweep appends what this machine can't run with a reason and nothing else: no code ran."""
    skipped = records.Row(good[0].point.replace(arm="vllm_tp", form=None), "skipped", "vllm_tp", good[0].node, 0, error="no such kernels here")
    write(root, [skipped, *good], "some")
    assert "8 ok" in "\n".join(recording.record("some", "some", root=root)) and recording.objections([skipped]) == ["no row has a time"]

from clearway.measure.groups import arrange, build_words, machine_name, workload
from record_builders import H200, MAC, made, pair

NIGHTLY = {**H200, "torch": "2.12.0.dev1", "torch_channel": "nightly"}


def test_machines_and_channels_never_share_a_group() -> None:
    report = arrange(
        ("one.jsonl", record)
        for records in (pair(), pair(provenance=MAC), pair(provenance=NIGHTLY))
        for record in records
    )
    assert [(group.machine, group.channel) for group in report.groups] == [
        ("NVIDIA H200, 140 GiB, compute 9.0 (CUDA)", "release"),
        ("Apple M1, 16 GiB (MPS)", "release"),
        ("NVIDIA H200, 140 GiB, compute 9.0 (CUDA)", "nightly"),
    ]
    assert [len(groups) for groups in report.machines.values()] == [2, 1]
    for group in report.groups:
        builds = {
            (entry.record.provenance["device"], entry.record.provenance["torch"]) for entry in group.entries
        }
        assert len(builds) == 1


def test_a_machine_used_two_ways_is_two() -> None:
    assert machine_name({**MAC, "kind": "cpu"}) == "Apple M1, 16 GiB, 8 cores (CPU)"
    assert machine_name({}) == "unknown machine"


def test_runs_differ_by_file_build_day_and_repetition() -> None:
    later = {**H200, "date": "2026-11-29T13:00:00Z"}
    tomorrow = {**H200, "date": "2026-11-30T00:00:00Z"}
    upgraded = {**H200, "torch": "2.13.0"}
    records = [("a", record) for record in pair() + pair(provenance=later) + pair(provenance=tomorrow)]
    records += [("b", record) for record in pair() + pair("other") + pair(provenance=upgraded)]
    (group,) = arrange(records).groups
    assert "".join(entry.run for entry in group.entries) == "AABBCCDDDDEE"
    assert group.letter(group.entries[0]) == "A"
    (alone,) = arrange([("a", pair()[0])]).groups
    assert alone.letter(alone.entries[0]) is None


def test_many_runs_have_letters_of_their_own() -> None:
    (group,) = arrange(("a", made("s", "c", [1.0])) for _ in range(60)).groups
    assert len(group.runs) == 60


def test_a_build_in_words() -> None:
    words = dict(build_words({**H200, "dirty": True}))
    assert words["commit"] == "fedcba9876 with uncommitted changes"
    assert words["torch"] == "2.11.0+cu130" and "dirty" not in words
    assert "triton" not in dict(build_words(MAC))


def test_a_workload_in_a_few_words() -> None:
    asked = {
        "what": "whole",
        "model": "embedded",
        "width": 256,
        "height": 384,
        "steps": 5,
        "sampler": "DPM++ SDE",
    }
    asked |= {"schedule": "Karras", "cfg_scale": 1.15, "ngms": 0.0, "batch_size": 1}
    (group,) = arrange([("f", made("s", "c", None, {**H200, "settings": {"scenario": asked}}))]).groups
    assert workload(group.entries[0]) == "model embedded, 256 × 384 px, 5 steps, DPM++ SDE Karras, CFG 1.15"
    other = {"what": "vae", "ngms": 0.3, "batch_size": 4, "width": None}
    (group,) = arrange([("f", made("s", "c", None, {**H200, "settings": {"scenario": other}}))]).groups
    assert workload(group.entries[0]) == "one call of vae, NGMS 0.3, 4 at a time"
    (group,) = arrange([("f", pair()[0])]).groups
    assert workload(group.entries[0]) == ""

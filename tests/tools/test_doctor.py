"""`python -m zeropg doctor`: it finds what is there, says why something is not, and notices when ranks cannot work."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from zeropg import __main__ as program
from zeropg._native import _C
from zeropg.tools import machine
from zeropg.tools.doctor import network, node, self_test, storage
from zeropg.tools.doctor.finding import Finding


def find(findings, topic: str) -> Finding:
    return next(finding for finding in findings if finding.topic == topic)


def test_doctor_checks_this_machine_and_two_ranks_add_up(capsys):
    status = program.main(["doctor", "--json"])
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    report = json.loads(said.out)
    findings = {entry["topic"]: entry for entry in report["findings"]}
    assert findings["self-test"]["state"] == "ok"
    for topic in ("torch", "SIMD", "UCX", "CPUs", "shared memory", "CMA", "memlock", "O_DIRECT", "io_uring", "GPU"):
        assert findings[topic]["state"] in ("ok", "warn", "no")
        assert findings[topic]["detail"]
    assert findings["zeropg"]["detail"].endswith("/zeropg")
    assert report["machine"]["cpus_allowed"] == len(os.sched_getaffinity(0))


def test_ranks_that_cannot_start_are_a_no_with_the_reason_and_status_1(monkeypatch, capsys, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o644)
    monkeypatch.setenv("ZEROPG_SECRET_FILE", str(secret))
    assert program.main(["doctor", "--path", str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "no   self-test" in output and "chmod 600" in output


def test_a_silent_rank_is_ended_at_the_deadline(monkeypatch):
    monkeypatch.setattr(self_test, "_SECONDS", 0.3)
    finding = self_test.check()
    assert finding.state == "no" and "rank 0 of 2" in finding.detail


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("_CHILD_SECONDS", 0.001, "no answer within 0.001 s"),
        ("sys", SimpleNamespace(executable="/none"), "No such file"),
    ],
)
def test_a_child_that_does_not_answer_is_a_warning(monkeypatch, name, value, words):
    monkeypatch.setattr(node, name, value)
    finding = find(node.check(ranks=1), "CMA")
    assert finding.state == "warn" and words in finding.detail and finding.remedy


def test_more_ranks_than_cpus_is_a_warning():
    finding = find(node.check(ranks=10_000), "CPUs")
    assert finding.state == "warn" and "fewer than 10000 ranks" in finding.detail and "taskset" in finding.remedy


def test_huge_pages_of_the_heap_and_of_shared_memory_are_judged_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(node, "_HUGE_PAGES", tmp_path)
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    assert find(node.check(ranks=1), "huge pages").state == "ok"
    shared = find(node.check(ranks=1), "shared huge pages")
    assert shared.state == "warn" and "no transparent huge pages in this kernel" in shared.detail
    for word, state in (("never", "warn"), ("deny", "warn"), ("advise", "ok"), ("within_size", "ok")):
        (tmp_path / "shmem_enabled").write_text(f"always force [{word}]\n")
        shared = find(node.check(ranks=1), "shared huge pages")
        assert shared.state == state and word in shared.detail
        assert shared.remedy == (f"echo advise > {tmp_path}/shmem_enabled" if state == "warn" else "")


@pytest.mark.parametrize(
    ("mode", "content", "state", "words"),
    [
        (0o600, "s", "ok", "ZEROPG_SECRET_FILE"),
        (0o640, "s", "no", "is open to other users"),
        (0o600, "", "no", "is empty"),
        (None, "", "no", "No such file"),
    ],
)
def test_secret_files_are_judged_as_the_group_judges_them(monkeypatch, tmp_path, mode, content, state, words):
    file = tmp_path / "secret"
    if mode is not None:
        file.write_text(content)
        file.chmod(mode)
    monkeypatch.setenv("ZEROPG_SECRET_FILE", str(file))
    monkeypatch.delenv("ZEROPG_SECRET", raising=False)
    finding = find(network.check(), "secret")
    assert finding.state == state and words in finding.detail


def test_a_missing_interface_is_named(monkeypatch):
    for variable, topic in (("GLOO_SOCKET_IFNAME", "gloo would use"), ("ZEROPG_INTERFACE", "zeropg would use")):
        monkeypatch.setenv(variable, "nowhere0")
        finding = find(network.check(), topic)
        assert finding.state == "no" and "nowhere0" in finding.detail
    monkeypatch.setenv("ZEROPG_INTERFACE", "lo")
    assert find(network.check(), "zeropg would use").state == "ok"


def test_storage_says_what_is_wrong_with_a_folder(tmp_path):
    assert find(storage.check(tmp_path), "O_DIRECT").state in ("ok", "no")
    assert list(tmp_path.iterdir()) == []
    assert find(storage.check(tmp_path / "missing"), "storage").detail.endswith("No such file or directory")
    assert find(storage.check(Path("/proc")), "O_DIRECT").state == "no"


def test_memory_is_no_device_for_offload():
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no /dev/shm")
    assert find(storage.check(Path("/dev/shm")), "device").state == "warn"


def test_cgroup_limits_are_read_up_the_tree(monkeypatch, tmp_path):
    inner = tmp_path / "job" / "rank"
    inner.mkdir(parents=True)
    (tmp_path / "job" / "cpu.max").write_text("150000 100000\n")
    (inner / "cpu.max").write_text("max 100000\n")
    (inner / "memory.max").write_text("1048576\n")
    real = machine.read_text
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(
        machine, "read_text", lambda path: "0::/job/rank" if path == Path("/proc/self/cgroup") else real(path)
    )
    assert machine.cgroup_cpu_limit() == 1.5
    assert machine.cgroup_memory_limit() == 1 << 20
    assert machine.usable_cpus() <= 1.5


def test_the_core_names_its_instruction_sets_and_this_host():
    assert _C.reduction_instruction_sets()[0] == "portable"
    assert _C.probe_host_id() == _C.probe_host_id() != ""


def test_a_domain_is_probed_or_given(monkeypatch):
    monkeypatch.delenv("ZEROPG_DOMAIN_ID", raising=False)
    assert (_C.probe_domain_id() or "none") in find(node.check(1), "domain").detail
    monkeypatch.setenv("ZEROPG_DOMAIN_ID", "left socket")
    assert "left socket" in find(node.check(1), "domain").detail


def test_wrong_options_and_help(capsys):
    for arguments, status in ((["doctor", "--ranks", "0"], 2), (["doctor", "--help"], 0)):
        with pytest.raises(SystemExit) as exit_:
            program.main(arguments)
        assert exit_.value.code == status
    captured = capsys.readouterr()
    assert "--ranks 0 is not positive" in captured.err and "examples:" in captured.out

"""`lily doctor` and `lily selftest`, with and without a Metal."""

import re

import pytest

import rungs
from lily import _core, selftest
from lily.__main__ import main
from simulated_metal import simulated
from support import CHECKPOINTS, metal


def test_doctor_without_metal(capsys):
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^Metal +none here$", printed, re.MULTILINE)
    assert re.search(r"^device +cpu .*: Metal has no GPU that serves$", printed, re.MULTILINE)
    assert re.search(r"^weights +0\.01 GB in \d+ tensors$", printed, re.MULTILINE)


def test_doctor_names_a_fault(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{")
    assert main(["doctor", "--model", str(tmp_path)]) == 1
    assert re.search(r"^fault +.*config\.json", capsys.readouterr().out, re.MULTILINE)


def test_doctor_with_metal(capsys):
    rungs.climb("metal")
    framework = simulated()
    with framework.having(cores=40, family=1010, working_set=(40 << 30)):
        facts = dict(line.split(": ", 1) for line in _core.metal_facts(metal()).splitlines())
        assert main(["doctor", "--option", f"kernels={metal()}"]) == 0
    assert facts["GPU cores"] == "40"
    assert facts["GPU family"] == "1010"
    assert facts["the GPU may use"] == "40960 MB, of which 512 are left to others"
    assert facts["command buffers"] == "at most 100 ms at 460 GB/s and 48.0 TFLOP/s"
    printed = capsys.readouterr().out
    assert re.search(r"^device +metal \(Simulated.*: Metal has a GPU that serves$", printed, re.MULTILINE)


def test_every_kernel_is_compiled_and_those_that_fail_are_named():
    rungs.climb("metal")
    framework = simulated()
    session = framework.session()
    with framework.having(refuse_pipeline=3):
        (fault,) = session._compile()
    assert re.search(r"kernel \w+ does not compile", fault)
    assert session._compile() == []


def test_selftest_finds_an_op_that_is_off():
    """Two models stand for a GPU that errs: all is alike but the weights of one layer's op."""
    cpu = _core.Session(_core.Weights(str(CHECKPOINTS["demo"])), {"device": "cpu"})
    state = [cpu.new_state(), cpu.new_state()]
    reads, writes = selftest.MIXERS[0]["gdn_in"]
    assert selftest._op(cpu, cpu, state, "gdn_in", 0, 2, reads, writes) == 0
    other = _core.Session(_core.Weights(str(CHECKPOINTS["demo"])), {"device": "cpu"})
    own = other._run
    assert own

    class Off:
        """A session whose gdn_in runs another layer's weights."""

        def __getattr__(self, name):
            return getattr(other, name)

        def _run(self, op, layer, parts):
            other._run(op, layer + 1, parts)

    cpu._set("x", cpu._get("x", 2) + 1)
    states = [cpu.new_state(), other.new_state()]
    assert selftest._op(cpu, Off(), states, "gdn_in", 0, 2, reads, writes) > selftest.TILES


@pytest.mark.long
def test_selftest_passes_on_metal(capsys):
    rungs.climb("metal")
    assert main(["selftest", "--quick", "--option", "device=metal", "--option", f"kernels={metal()}"]) == 0
    printed = capsys.readouterr().out
    assert "ok     kernels:" in printed
    assert printed.count("\nok ") >= 30
    assert printed.rstrip().endswith(" checks, 0 wrong")


def test_selftest_without_a_gpu_says_so(capsys):
    assert main(["selftest"]) == 0
    assert "no GPU: none here" in capsys.readouterr().out


def test_selftest_survives_what_stops_it(capsys):
    assert main(["selftest", "--option", "device=metal"]) == 1
    assert "WRONG  stopped: option device: metal wants a Mac" in capsys.readouterr().out

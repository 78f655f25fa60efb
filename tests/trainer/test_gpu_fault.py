"""A GPU fault that CUDA repeats until the process ends: a new process resumes the run."""

from pathlib import Path

from agentrl_cli.errors import PolicyError, device_fault
from agentrl_cli.store import Store
from tests.helpers.train import spawn, write_project

FAULTY = """\
from pathlib import Path

from agentrl_cli.inference.model_runner import ModelRunner
from agentrl_cli.inference.policy import LocalPolicy

ILLEGAL = "CUDA error: an illegal memory access was encountered\\nCUDA kernel errors might be reported later."


class Faulty(ModelRunner):
    # What a GPU with a memory fault does: after some steps every call fails, until the process ends.
    steps = 0

    def decode(self, pool, sequences, *given):
        self.steps += 1
        limit = Path(__file__).with_name("limit")
        if limit.exists() and self.steps > int(limit.read_text()):
            if limit.read_text() == "9":
                limit.unlink()
            raise RuntimeError(ILLEGAL)
        return super().decode(pool, sequences, *given)


def make(source):
    return LocalPolicy(source.model(), context_length=96, rows=8, version=source.name, runner=Faulty)
"""


def test_a_run_continues_in_a_new_process(tmp_path: Path, model: Path) -> None:
    project = write_project(
        tmp_path, model, remote={"backend": "sampler.py:make"}, train={"steps": 3, "save_every": 1}
    )
    (project / "sampler.py").write_text(FAULTY)
    (project / "limit").write_text("9")
    code, text = spawn(project, "train")
    assert code == 0, text
    assert (
        "the GPU failed (CUDA error: an illegal memory access was encountered); a new process resumes"
        in text
    )
    with Store.open(project / "runs/agentrl.db", readonly=True) as store:
        (run,) = store.runs.all()
        assert (run.status, run.step, run.error) == ("finished", 3, "")
        kinds = [event["kind"] for event in store.journal.events(run.id)]
        assert kinds.index("restarted") < kinds.index("resumed") and kinds.count("restarted") == 1
        steps = [row["step"] for row in store.runs.steps(run.id)]
        assert steps == [1, 2, 3], "no step is lost, and none is there twice"


def test_what_is_such_a_fault() -> None:
    lost = PolicyError("The model could not generate.")
    lost.__cause__ = RuntimeError(
        "CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA."
    )
    assert device_fault(lost) == "CUDA error: device-side assert triggered"
    for other in (
        "CUDA out of memory. Tried to allocate 2 GiB",
        "CUDA error: out of memory",
        "HIPPO error: none",
    ):
        assert not device_fault(RuntimeError(other))

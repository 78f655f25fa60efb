"""`agentrl certify` on six planted faults and on clean targets, as folders, GGUF files and addresses; CPU seconds.

    python benchmarks/certify.py [--model MODEL] [--steps N] [--project FOLDER] [--gguf] [--server COMMAND]

Trains calc-task with LoRA, or takes the newest run of a copy of a project (`--project`), merges its best checkpoint,
and plants: another chat template, a first token, no adapter, an adapter at twice its scale, weights of 3 bits, a
tokenizer without its last merges. `--gguf` needs llama-cpp-python. `--server` is a command with {file} and {port}
that serves every GGUF file, too: "llama-server -m {file} --port {port} --jinja". `--out`: the results' file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from agentrl_cli.plugins.certify.replay import round_weights
from benchmarks.machine import machine_and_load

TRAIN = (
    "--lora",
    "--lr",
    "0.003",
    "--set",
    "rollout.group_size=4",
    "--set",
    "rollout.prompts_per_step=4",
)


def agentrl(folder: Path, *args: str) -> tuple[int, str, float]:
    """Run a command in a process of its own: exit status, stdout, CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = [sys.executable, "-P", "-m", "agentrl_cli", *args]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 4):
        sys.exit(f"agentrl {' '.join(args)}: {done.stderr[-2000:]}")
    return (
        done.returncode,
        done.stdout,
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    )


def plant_template(folder: Path) -> None:
    """Leave out the line break behind the names of roles."""
    file = folder / "chat_template.jinja"
    text = file.read_text(encoding="utf-8")
    assert "assistant\\n" in text
    file.write_text(text.replace("assistant\\n", "assistant"), encoding="utf-8")


def plant_bos(folder: Path) -> None:
    """Let every text begin with a token that the model never saw there."""
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    first = next(one for one in data["added_tokens"] if one["content"] == "<|endoftext|>")
    special = {"id": first["content"], "ids": [first["id"]], "tokens": [first["content"]]}
    piece = {"Sequence": {"id": "A", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": first["content"], "type_id": 0}}, piece],
        "pair": [piece, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {first["content"]: special},
    }
    file.write_text(json.dumps(data), encoding="utf-8")


def plant_tokenizer(folder: Path) -> None:
    """Drop the last fifth of the merges: the vocabulary of an earlier version."""
    file = folder / "tokenizer.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    merges = data["model"]["merges"]
    data["model"]["merges"] = merges[: len(merges) * 4 // 5]
    file.write_text(json.dumps(data), encoding="utf-8")


def plant_rounding(folder: Path) -> None:
    """Round every matrix to 3 bits in blocks of 32."""
    for file in folder.glob("*.safetensors"):
        held = {
            name: round_weights(3, name, value.float()).to(value.dtype)
            for name, value in load_file(file).items()
        }
        save_file(held, file, {"format": "pt"})


def nothing(folder: Path) -> None:
    """Plant nothing."""


def double(adapter: Path) -> None:
    """Double the scale of an adapter folder."""
    file = adapter / "adapter_config.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(data | {"lora_alpha": 2 * data["lora_alpha"]}), encoding="utf-8")
    for name in ("checksums.json", "trainer.pt"):
        (adapter / name).unlink(missing_ok=True)


CASES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "": ("best", nothing),
    "template": ("best", plant_template),
    "BOS": ("best", plant_bos),
    "adapter missing": ("base", nothing),
    "adapter scale": ("doubled", nothing),
    "quantisation": ("best", plant_rounding),
    "tokenizer": ("best", plant_tokenizer),
}
"""Fault to the checkpoint that is merged and what is done to the merged folder."""


def targets(project: Path, run: str, *, gguf: bool) -> Iterator[tuple[str, str, Path]]:
    """Yield kind, planted fault and target."""
    (best,) = [
        path for path in (project / "runs").rglob("adapter_config.json") if "best" in path.parts
    ]
    doubled = project / "doubled"
    shutil.copytree(best.parent, doubled)
    double(doubled)
    sources = {"best": f"{run}@best", "base": f"{run}@base", "doubled": str(doubled)}
    for fault, (source, plant) in CASES.items():
        out = project / f"target-{fault.replace(' ', '-') or 'clean'}"
        agentrl(project, "merge", sources[source], str(out))
        plant(out)
        (out / "checksums.json").unlink()
        yield "folder", fault, out
        for kind in ("f16", "q8_0") if gguf and not fault else ("f16",) if gguf else ():
            made = out.with_name(f"{out.name}-{kind}")
            agentrl(project, "merge", str(out), str(made), "--gguf", "--gguf-type", kind)
            yield f"gguf {kind}", fault, next(made.glob("*.gguf"))


@contextmanager
def served(server: str, file: Path) -> Iterator[str]:
    """Run llama-server with a file; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = server.format(file=file, port=port).split()
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1800):
            with socket.socket() as tried:
                if not tried.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def train(project: Path, steps: str) -> None:
    """Make a project and train it, with evaluations before and after."""
    agentrl(project.parent, "init", "calc-task", str(project))
    evals = (f"train.eval.every={steps}", "train.eval.tasks=24")
    sets = (part for one in evals for part in ("--set", one))
    agentrl(project, "train", "--steps", steps, *sets, *TRAIN)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--steps", default="10")
    parser.add_argument("--project", type=Path)
    parser.add_argument("--gguf", action="store_true")
    parser.add_argument("--server", default="")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    os.environ["AGENTRL_MODEL__NAME"] = given.model
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:
        project = Path(place) / "project"
        if given.project:
            shutil.copytree(given.project, project)
        else:
            train(project, given.steps)
        run = json.loads(agentrl(project, "ls", "runs", "--json")[1])[0]["name"]

        def certify(kind: str, fault: str, target: str) -> None:
            began = time.monotonic()
            code, out, cpu = agentrl(project, "certify", f"{run}@best", target, "--json")
            said, seconds = json.loads(out), time.monotonic() - began
            found = next((one["fault"] for one in said["checks"] if one["ok"] is False), "")
            checks = {one["name"]: one["text"] for one in said["checks"]}
            right = found == fault and code == 4 * bool(fault)
            row = {"target": kind, "planted": fault, "named": found, "exit": code, "right": right}
            rows.append(
                row | {"cpu_seconds": round(cpu, 1), "seconds": round(seconds, 1), "checks": checks}
            )
            print(
                f"{kind:14} planted {fault or 'nothing':16} named {found or 'nothing':16} {cpu:6.1f} CPU s",
                flush=True,
            )

        for kind, fault, target in targets(project, run, gguf=given.gguf):
            certify(kind, fault, str(target))
            if given.server and kind == "gguf f16":
                with served(given.server, target) as url:
                    certify("address", fault, f"model@{url}")
    right = sum(row["right"] for row in rows)
    print(f"{right} of {len(rows)} right")
    if given.out:
        facts = {"model": given.model, "steps": int(given.steps), **machine_and_load()}
        given.out.write_text(
            json.dumps({**facts, "right": right, "of": len(rows), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

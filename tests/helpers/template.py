"""Real chat templates, read from packages that ship them; pinned by version and hash.

`make test` fetches them once into `.cache/` of the checkout, through pip: `python -m tests.helpers.template`. Tests
only read them, and skip where they are not there. Nothing of these packages is installed or run, but that pip asks
llama-cpp-python's build for its name and version.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

ROOT = next(
    folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file()
)
FOLDER = ROOT / ".cache" / "templates"
# Package to the version and the SHA-256 of the file: two wheels, and a source archive that holds
# llama.cpp's.
SOURCES = {
    "trl": ("1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"),
    "axolotl": ("0.19.0", "f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc"),
    "llama-cpp-python": (
        "0.3.36",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    ),
}

# The templates of each package, so that the tests are the same with and without them.
SHIPPED = {
    "trl": """
        cohere cohere2 cohere2_training cohere_training deepseek_r1_distill deepseek_r1_distill_training deepseekv3
        deepseekv3_training diffusion_gemma diffusion_gemma_training gemma gemma3 gemma3_training gemma4 gemma4_v2
        gemma4_v3 gemma4_v4 gemma4_v5 gemma_training glm4moe glm4moe_training gptoss gptoss_training idefics3
        idefics3_training lfm2 lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl lfm2_training lfm2_v2 lfm2_v2_training llama3 llama3_1
        llama3_2 llama3_training llava_next llava_next_training muse_glimmer muse_glimmer_training
        nemotron_3_5_lightning nemotron_3_5_lightning_training nemotron_3_nano nemotron_3_nano_training nemotron_3_super
        nemotron_3_super_training nemotron_3_ultra nemotron_3_ultra_training phi3 phi3_5 phi3_5_training phi3_training
        qwen2_5 qwen2_5_training qwen2_5_vl qwen2_5_vl_training qwen3 qwen3_5_nothink qwen3_5_nothink_training
        qwen3_5_think qwen3_5_think_training qwen3_6 qwen3_6_training qwen3_8 qwen3_8_training qwen3_instruct_2507
        qwen3_instruct_2507_training qwen3_training qwen3_vl qwen3_vl_training smolvlm smolvlm_training
    """.split(),
    "axolotl": """
        alpaca aya chatml cohere command_a command_a_rag command_a_tool_use deepseek_v2 deepseek_v3 exaone exaone4
        falcon_h1 gemma gemma3 gemma3n gemma4 gemma4_unified jamba llama3 llama3_2_vision llama4 llava metharme
        mistral_v1 mistral_v2v3 mistral_v3_tekken mistral_v7_tekken nemotron_h phi_3 phi_35 phi_4 pixtral qwen2_vl qwen3
        qwen3_5 qwen_25
    """.split(),
    "llama-cpp-python": """
        Apertus-8B-Instruct Apriel-1.6-15b-Thinker-fixed Bielik-11B-v3.0-Instruct ByteDance-Seed-OSS Cohere2MoE
        CohereForAI-c4ai-command-r-plus-tool_use CohereForAI-c4ai-command-r7b-12-2024-tool_use GLM-4.6 GLM-4.7-Flash
        GigaChat3-10B-A1.8B GigaChat3.1-10B-A1.8B HuggingFaceTB-SmolLM3-3B Kimi-K2-Instruct Kimi-K2-Thinking Kimi-K3
        LFM2-8B-A1B LFM2.5-8B-A1B LFM2.5-Instruct MiMo-VL MiniMax-M1 MiniMax-M2 MiniMax-M3
        Mistral-Small-3.2-24B-Instruct-2506 NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 NVIDIA-Nemotron-Nano-v2
        NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use NousResearch-Hermes-3-Llama-3.1-8B-tool_use Qwen-QwQ-32B
        Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B Qwen3-Coder Qwen3.5-4B Reka-Edge Spark2.5 StepFun3.5-Flash
        deepseek-ai-DeepSeek-R1-Distill-Llama-8B deepseek-ai-DeepSeek-R1-Distill-Qwen-32B deepseek-ai-DeepSeek-V3.1
        deepseek-ai-DeepSeek-V3.2 deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731
        fireworks-ai-llama-3-firefunction-v2 google-gemma-2-2b-it google-gemma-4-31B-it
        google-gemma-4-31B-it-interleaved ibm-granite-granite-3.3-2B-Instruct ibm-granite-granite-4.0
        ibm-granite-granite-4.1 inclusionai-ling-3.0-flash llama-cpp-deepseek-r1 llama-cpp-rwkv-world
        meetkai-functionary-medium-v3.1 meetkai-functionary-medium-v3.2 meta-llama-Llama-3.1-8B-Instruct
        meta-llama-Llama-3.2-3B-Instruct meta-llama-Llama-3.3-70B-Instruct microsoft-Phi-3.5-mini-instruct
        mistralai-Ministral-3-14B-Reasoning-2512 mistralai-Mistral-Nemo-Instruct-2407 moonshotai-Kimi-K2 muse-glimmer
        openai-gpt-oss-120b openbmb-MiniCPM5-1B poolside-Laguna-S-2.1 poolside-Laguna-XS-2.1 poolside-Laguna-XS.2
        tencent-Hy3 unsloth-Apriel-1.5 unsloth-mistral-Devstral-Small-2507 upstage-Solar-Open-100B
    """.split(),
}


class NotFetched(Exception):
    """Why a package's templates are not there."""


def templates_of(package: str) -> dict[str, str]:
    """Name to source of a package's templates. Skips the test that asks for them where they were not fetched."""
    found = kept_templates(package)
    if not found:
        pytest.skip(
            f"the templates of {package} are not in {FOLDER}: `make test` fetches them over the network"
        )
    return found


@cache
def kept_templates(package: str) -> dict[str, str]:
    """Name to source of a package's templates; empty if they were not fetched."""
    path = _path(package, FOLDER)
    if not path.is_file():
        return {}
    with zipfile.ZipFile(path) as found:
        return {name: found.read(name).decode() for name in found.namelist()}


def _path(package: str, folder: Path) -> Path:
    return folder / f"{package}-{SOURCES[package][0]}-templates.zip"


def fetch(package: str, folder: Path = FOLDER) -> Path:
    """Fetch a package's templates unless they are there: whole or not at all. Raises NotFetched."""
    kept = _path(package, folder)
    if not kept.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            made = Path(place) / kept.name
            _keep(_download(package, Path(place)), made)
            os.replace(made, kept)
    return kept


def _download(package: str, place: Path) -> Path:
    version, digest = SOURCES[package]
    kind = "--no-binary" if package == "llama-cpp-python" else "--only-binary"
    command = [sys.executable, "-m", "pip", "download", f"{package}=={version}", "--no-deps", "-q"]
    command += [kind, package, "-d", str(place), "--retries", "0", "--timeout", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    path = next(iter(place.glob(f"{package.replace('-', '_')}-{version}[-.]*")), None)
    if path is None:
        raise NotFetched((done.stderr.strip().splitlines() or ["pip fetched nothing"])[-1])
    if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
        raise NotFetched(f"{path.name} is not the file that was pinned: its SHA-256 differs")
    return path


def _keep(archive: Path, target: Path) -> None:
    found: dict[str, bytes] = {}
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            found = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".jinja")}
    else:
        with tarfile.open(archive) as source:
            for member in source:
                if "/models/templates/" in member.name and member.name.endswith(".jinja"):
                    file = source.extractfile(member)
                    assert file is not None
                    found[member.name] = file.read()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as kept:
        for name, text in found.items():
            kept.writestr(Path(name).stem, text)


def main() -> int:
    """Fetch all; says what is missing. 1 where something is."""
    missing = 0
    for package in SOURCES:
        try:
            fetch(package)
        except NotFetched as error:
            print(
                f"The chat templates of {package} could not be fetched, their tests skip: {error}",
                file=sys.stderr,
            )
            missing = 1
    return missing


if __name__ == "__main__":
    sys.exit(main())

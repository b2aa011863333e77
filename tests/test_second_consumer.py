"""Exported folders are read by a program that shares no code with transformers, mistral.rs
(`python -m pip install mistralrs`), and generate the same tokens there."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from disttrain_cli.runtime.outputs.export import export
from disttrain_cli.spec.runfile import read_run
from tests.runtime.outputs.test_whole_export import saved
from tests.test_chain import document
from tests.test_tiny_families import ASKED, generated

READ = """
import json, sys, mistralrs as m
folder, image, text = sys.argv[1:]
which = m.Which.MultimodalPlain(model_id=folder, dtype=m.ModelDType.F32)
runner = m.Runner(which=which, max_seqs=1, token_source="none")
asked = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": text}]
reply = runner.send_chat_completion_request(m.ChatCompletionRequest(
    model="default", messages=[{"role": "user", "content": asked}], max_tokens=16, temperature=0.0,
    top_k=1, logprobs=True, top_logprobs=1))
print("tokens:", json.dumps([one.token for one in reply.choices[0].logprobs.content]))
"""
#: By preset: what mistral.rs wants before the question, which it adds itself for some families.
FAMILIES = {
    "tiny-qwen2.5-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "tiny-qwen3-vl": "",
    "tiny-qwen3-vl-moe": "",
    "tiny-qwen3.5": "",
}


def published_form(folder):
    """Write configurations as published folders have them: all fields, of Qwen2.5-VL those of the
    LLM at the top."""
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    llm, tower = whole["text_config"], whole["vision_config"]
    llm |= {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
    llm |= {"tie_word_embeddings": whole["tie_word_embeddings"]}
    tower |= {"hidden_act": "gelu_pytorch_tanh", "in_channels": 3}
    if whole["model_type"] == "qwen3_5":
        tower["deepstack_visual_indexes"] = []
    else:
        rope = llm.pop("rope_parameters")
        llm |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    if "num_experts" in llm:
        llm["norm_topk_prob"] = True
    if whole["model_type"] == "qwen2_5_vl":
        llm |= {"sliding_window": 1024, "use_sliding_window": False}
        llm["rope_scaling"]["type"] = (
            llm["rope_scaling"].pop("rope_type").replace("default", "mrope")
        )
        tower |= {"hidden_act": "silu", "in_chans": 3, "tokens_per_second": 2}
        whole = whole.pop("text_config") | whole
    path.write_text(json.dumps(whole))
    path = folder / "preprocessor_config.json"
    fields = json.loads(path.read_text())
    size = fields.pop("size")
    pixels = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    path.write_text(json.dumps(fields | pixels))


@pytest.mark.slow
@pytest.mark.benchmark
@pytest.mark.parametrize("preset", FAMILIES)
def test_an_exported_folder_generates_the_same_in_another_program(tmp_path, monkeypatch, preset):
    pytest.importorskip("mistralrs")
    monkeypatch.setenv("MISTRALRS_CPU_KV_F32", "1")
    document(tmp_path, "init", "run", "--preset", preset, "--sample-data")
    published_form(tmp_path / "run" / "model")
    run = read_run(tmp_path / "run" / "disttrain.yaml")
    saved(run, by=0.02)
    export(run, tmp_path / "out")
    image = tmp_path / "image.png"
    Image.linear_gradient("L").resize((56, 84)).convert("RGB").save(image)
    done = subprocess.run(
        [sys.executable, "-c", READ, tmp_path / "out", image, FAMILIES[preset] + ASKED],
        capture_output=True,
        text=True,
    )
    ids, words = generated(tmp_path / "out", "Qwen2VLImageProcessorPil", image, do_sample=False)
    theirs = json.loads(done.stdout.partition("tokens: ")[2] or "[]")
    assert theirs == [words.decode(one) for one in ids], done.stderr

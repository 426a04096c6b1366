"""Makes the golden values of tests/models/test_peft.py with the PEFT library (needs torch, peft).

    PYTHONPATH=. python tests/golden/make_adapters.py

Writes, per base model, the adapter_config.json and the names and shapes of the tensors that PEFT
writes, a seed for their values, and the logits of the adapted model.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import peft
from safetensors.numpy import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "models"))
import adapters  # noqa: E402

EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {"llama_untied": EVERYTHING, "qwen2_tied": ["q_proj", "o_proj"],
           "qwen3_tied": ["k_proj", "v_proj", "down_proj"],
           "qwen3_5_moe_untied": [*EVERYTHING, "in_proj_qkv", "in_proj_z", "in_proj_a",
                                  "in_proj_b", "out_proj"]}


def make_adapter(base, targets, seed):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        peft.get_peft_model(adapters.torch_base(base), peft.LoraConfig(
            r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM"),
        ).save_pretrained(folder)
        shapes = {name: list(value.shape)
                  for name, value in load_file(folder / "adapter_model.safetensors").items()}
        config_json = (folder / "adapter_config.json").read_text()
        adapters.write_folder(folder, config_json, shapes, seed)
        logits, _ = adapters.peft_logits(base, folder)
    np.savez_compressed(HERE / f"adapter_{base}.npz", config=config_json,
                        shapes=json.dumps(shapes), seed=seed, logits=logits)


if __name__ == "__main__":
    for number, (base, targets) in enumerate(TARGETS.items()):
        make_adapter(base, targets, 1000 + number)

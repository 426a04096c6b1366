"""Small random adapters in the PEFT library's format, and what PEFT makes of them."""

from pathlib import Path

import numpy as np
import tiny_models
from safetensors.numpy import save_file


def write_folder(folder: Path, config_json: str, shapes: dict, seed: int) -> Path:
    """Writes an adapter with random tensors of the given names and shapes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config_json)
    random = np.random.RandomState(seed)
    save_file({name: (0.2 * random.standard_normal(shape)).astype(np.float32)
               for name, shape in sorted(shapes.items())}, folder / "adapter_model.safetensors")
    return folder


def write_base(folder: Path, case: str) -> tuple[Path, np.ndarray, np.ndarray]:
    """Writes a golden model; returns its folder and its golden tokens and lengths."""
    golden = tiny_models.golden(case)
    tensors = tiny_models.random_tensors(golden["shapes"], golden["seed"])
    return (tiny_models.write_folder(folder, golden["config"], tensors),
            golden["tokens"], golden["lengths"])


def torch_base(case: str):
    """Returns a golden model in transformers."""
    import torch_models
    import transformers

    golden = tiny_models.golden(case)
    return torch_models.from_tensors(
        transformers.AutoConfig.for_model(**golden["config"]),
        tiny_models.random_tensors(golden["shapes"], golden["seed"]))


def peft_logits(case: str, folder: Path):
    """Returns a golden model's logits with the adapter that PEFT reads from `folder`."""
    import peft
    import torch
    import torch_models

    golden = tiny_models.golden(case)
    with torch.no_grad():
        model = peft.PeftModel.from_pretrained(torch_base(case), str(folder)).eval()
        return torch_models.run(model, golden["tokens"], golden["lengths"])[0].numpy(), model

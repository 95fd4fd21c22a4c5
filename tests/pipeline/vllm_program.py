"""Builds an exported model with vLLM on a CPU and says what it holds: `vllm_program.py FOLDER PICTURE...`,
JSON on the last line. vLLM knows no CPU for Kimi K3: its streams and its choice of expert kernels are
replaced, neither of which changes a parameter."""

import json
import os
import sys

os.environ |= {"VLLM_KIMI_K3_GEMM_AR": "0", "VLLM_ENABLE_GEMM_RS": "0", "VLLM_TARGET_DEVICE": "cpu"}

import torch
import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as experts
from PIL import Image
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing import ProcessorInputs
from vllm.multimodal.processing.context import TimingContext
from vllm.platforms.cpu import CpuPlatform
from vllm.plugins import load_general_plugins

torch.cuda.Stream = torch.cuda.Event = type("Stream", (), {})
CpuPlatform.check_and_update_config = classmethod(lambda cls, config: None)
experts.select_unquantized_moe_backend = lambda *args, **kwargs: (experts.UnquantizedMoeBackend.TRITON, None)

folder, *pictures = sys.argv[1:]
load_general_plugins()
settings = EngineArgs(model=folder, dtype="float32", max_model_len=512, enforce_eager=True)
config = settings.create_engine_config()
with set_current_vllm_config(config), torch.no_grad():
    init_distributed_environment(1, 0, f"file://{folder}/.vllm", 0, backend="gloo")
    initialize_model_parallel(1, 1)
    model = initialize_model(vllm_config=config)
    own = dict(model.named_parameters())
    # What is not loaded would be noticed; filling between projections stays zero.
    for name, tensor in own.items():
        tensor.fill_(0.0 if name.endswith("in_proj_qkvgfab.weight") else float("nan"))
    loader = get_model_loader(config.load_config)
    loaded = model.load_weights(loader.get_all_weights(config.model_config, model))

    processor = MULTIMODAL_REGISTRY.create_processor(config.model_config)
    items = processor.info.parse_mm_data({"image": [Image.open(path).convert("RGB") for path in pictures]})
    marks = config.model_config.hf_config.image_placeholder * len(pictures)
    ids = processor.info.get_tokenizer().encode(f"Look: {marks} now")
    given = processor.apply(ProcessorInputs(prompt=ids, mm_data_items=items), TimingContext(enabled=False))
    fields = given["mm_kwargs"].get_data()
    for part in (model.vision_tower, model.mm_projector):
        for module in part.modules():
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)
    features = model.embed_multimodal(**fields)

latents = [m for name, m in model.named_modules() if name.endswith("_a_layernorm")]
norms = [m for m in model.vision_tower.modules() if isinstance(m, torch.nn.RMSNorm)]
print(
    json.dumps(
        {
            "class": type(model).__name__,
            "left": sorted(set(own) - set(loaded)),
            "sum": sum(tensor.double().abs().sum().item() for tensor in own.values()),
            "eps": sorted({norm.eps for norm in norms}, key=str),
            "latent_eps": sorted({norm.variance_epsilon for norm in latents}),
            "ids": list(given["prompt_token_ids"]),
            "features": [each.tolist() for each in features],
        }
    )
)

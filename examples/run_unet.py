"""Run a diffusion pipeline of diffusers, before and after the norms of its components are swapped.

pip install "normswap[diffusers]" && python examples/run_unet.py
"""

from __future__ import annotations

import argparse
import time

import torch
from diffusers import DDIMScheduler, DiffusionPipeline, LDMPipeline, UNet2DModel, VQModel

from normswap.integrations.diffusers import optimize_pipeline

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE, CHANNELS = (64, (128, 256)) if DEVICE == "cuda" else (8, (16, 32))


def pipeline() -> DiffusionPipeline:
    """A latent diffusion with random weights, in the place of ``from_pretrained``."""
    torch.manual_seed(0)
    sizes = {"block_out_channels": CHANNELS, "norm_num_groups": 8, "layers_per_block": 1}
    unet = UNet2DModel(
        sample_size=SIZE,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **sizes,
    )
    vqvae = VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        **sizes,
    )
    made = LDMPipeline(vqvae.eval(), unet.eval(), DDIMScheduler()).to(DEVICE)
    made.set_progress_bar_config(disable=True)
    return made


def image(made: DiffusionPipeline, steps: int) -> tuple[torch.Tensor, float]:
    """An image, and the seconds that it took."""
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    found = made(generator=generator, num_inference_steps=steps, output_type="np").images
    return torch.tensor(found), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    made = pipeline()
    image(made, 2)  # warm up
    expected, before = image(made, steps)
    for name, report in optimize_pipeline(made, num_inference_steps=1, output_type="np").items():
        print(f"{name}: {report}\n")
    image(made, 2)
    same, after = image(made, steps)
    print(f"largest difference between the images: {float((same - expected).abs().max()):.2g}")
    print(f"an image: {before * 1e3:.1f} ms before, {after * 1e3:.1f} ms after")


if __name__ == "__main__":
    main()

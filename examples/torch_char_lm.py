"""A character-level Transformer on the Python standard library's own sources, trained on mixed hardware.

    horovodrun -np 2 python examples/torch_char_lm.py
    horovodrun -np 4 -H fast:2,slow:2 python examples/torch_char_lm.py --steps 2000 --checkpoint char_lm.pt

Start it again with the same --checkpoint and it goes on where it stopped.
"""

import argparse
import os
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import hvd_hetero.torch as hvd


def read_text(megabytes: float) -> torch.Tensor:
    """The library's sources one after the other, as ASCII codes: uint8 of shape [characters]."""
    folder, text, wanted = Path(sysconfig.get_path("stdlib")), bytearray(), int(megabytes * 1e6)
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" not in path.parts:
            text += path.read_bytes().decode("utf-8", "ignore").encode("ascii", "ignore")
        if len(text) >= wanted:
            break
    return torch.frombuffer(text[:wanted], dtype=torch.uint8)


class Windows(torch.utils.data.Dataset):
    """Windows of `context` characters, and the same one character later: int64 of shape [context] each."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, normalised before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.unflatten(-1, (self.heads, width // self.heads)).transpose(1, 2)
            for part in self.attend(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


class CharLM(nn.Module):
    """Logits of the next character: float of shape [batch, context, 128]."""

    def __init__(self, context: int = 64, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(128, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.characters(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(hidden)))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean loss per character, in nats."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def validate(model: nn.Module, loader: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The sum of the losses of windows, and their number."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for x, y in loader:
        total += torch.tensor([loss_of(model, x, y).item() * len(x), len(x)])
    model.train()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--global-batch-size", type=int, default=64)
    parser.add_argument("--megabytes", type=float, default=2.0, help="of text")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--report-every", type=int, default=20)
    parser.add_argument("--checkpoint", help="written every --report-every steps; read at start when it is there")
    parser.add_argument("--strategy", choices=["synchronous", "local"], default="synchronous")
    arguments = parser.parse_args()
    if min(arguments.context, arguments.report_every, arguments.megabytes) <= 0:
        parser.error("--context, --report-every and --megabytes: expected numbers above 0")

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    text = read_text(arguments.megabytes)
    cut = int(0.9 * len(text))
    training, validation = Windows(text[:cut], arguments.context), Windows(text[cut:], arguments.context)
    model = CharLM(arguments.context)

    balancer = hvd.Balancer(global_batch_size=arguments.global_batch_size)
    loader = hvd.BalancedDataLoader(training, balancer=balancer, seed=0)
    some = torch.utils.data.Subset(validation, range(min(512, len(validation))))
    evaluation = hvd.EvaluationDataLoader(some, balancer=balancer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    step, saved = 0, None
    if arguments.checkpoint and hvd.rank() == 0 and os.path.exists(arguments.checkpoint):
        saved = torch.load(arguments.checkpoint, weights_only=True)
    saved = hvd.broadcast_object(saved, root_rank=0)  # the file need not be on every node
    if saved:
        step = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        balancer.load_state_dict(saved["balancer"])
        loader.load_state_dict(saved["loader"])
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), balancer=balancer, strategy=arguments.strategy
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    started, since = time.perf_counter(), step
    while step < arguments.steps:
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            step += 1
            if step == arguments.steps or step % arguments.report_every == 0:
                optimizer.merge()  # all ranks: now they hold one model, whatever the strategy
            if step % arguments.report_every == 0:
                rate = arguments.global_batch_size * (step - since) / (time.perf_counter() - started)
                total = hvd.allreduce(validate(model, evaluation), op=hvd.Sum, name="validation")
                if hvd.rank() == 0:
                    print(
                        f"step {step:5d}  validation loss {total[0] / total[1]:.4f}  {rate:6.1f} samples/s  "
                        f"shares {':'.join(map(str, balancer.plan.shares))}",
                        flush=True,
                    )
                if arguments.checkpoint and hvd.rank() == 0:
                    saved = {
                        "step": step,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "balancer": balancer.state_dict(),
                        "loader": loader.state_dict(),
                    }
                    torch.save(saved, arguments.checkpoint + ".part")
                    os.replace(arguments.checkpoint + ".part", arguments.checkpoint)
                started, since = time.perf_counter(), step
            if step >= arguments.steps:
                break
    hvd.shutdown()


if __name__ == "__main__":
    main()

"""The job and the strategy whose files are kept here."""

import torch
from torch import nn

import piper

STRATEGY = [
    piper.replicate(piper.at(LAYER=range(0, 2)), devices=[0, 1], zero=3, bucket_mb=1),
    piper.replicate(piper.at(LAYER=[2, 3]), devices=[2, 3], zero=2, reduce_stream="reduce"),
    piper.shard(piper.at(LAYER=2, EP="*"), devices=[2, 3], ways=2),
    piper.shard(piper.at(LAYER=3), devices=[2, 3], ways=2, axis="TP", weights={"*.up": 0, "*.down": 1}),
    piper.split(piper.at(), axis="MB", parts=2),
    piper.order([[piper.at(LAYER=0, MB=0, PASS="F")], [piper.at(LAYER=0, MB=1, PASS="F")]]),
    piper.remat(piper.at(LAYER=1), budget=0.5),
    piper.precision(piper.at(LAYER=3), "fp8"),
    piper.protect(piper.at(), copies=1),
    piper.offload(piper.at(LAYER=0)),
    piper.place(piper.at(HEAD=None), devices=[0]),
]


def job() -> piper.Job:
    """A job of two devices that shard everything; its state has every section of a checkpoint."""
    rows = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
    return piper.Job(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2)),
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [{"x": rows}],
        strategy=[piper.replicate(piper.at(), devices=[0, 1], zero=3)],
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        precision="fp64",
        steps=4,
    )

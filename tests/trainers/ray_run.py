"""Two workers of Ray Train, `FOLDER STEPS SEED`: a whole run, and one with a killed worker.

The worker is killed at a random step.
Losses are in `FOLDER/NAME-RANK/losses.txt`; the error of an unsupported upload in `FOLDER/refusal.txt`.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def train_loop(config: dict[str, Any]) -> None:
    """Train to a step by DDP, saving every third."""
    import torch
    from ray import train
    from ray.train.torch import prepare_model

    import shrinkpoint as sp
    from shrinkpoint.trainers.ray import report, restore

    rank = train.get_context().get_world_rank()
    home = Path(config["folder"]) / f"{config['name']}-{rank}"
    home.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.LayerNorm(65), torch.nn.Linear(65, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state, step = restore("lossless"), 0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    model = prepare_model(model)
    kills = config["kill"] is not None  # of a killed worker Ray may leave a folder behind
    with (home / "losses.txt").open("a") as out:
        while step < config["steps"]:
            inputs = torch.randn(4, 33, generator=torch.Generator().manual_seed(2 * step + rank))
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            print(step, float(loss.detach()).hex(), file=out, flush=True)
            if step % 3 == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                report({"step": step}, state, cfg="lossless")
                end = time.monotonic() + 60  # Ray removes folders when it gets to it
                while step == 9 and len(list(home.parent.glob(f"storage/{config['name']}/checkpoint_*"))) > 2 + kills:
                    assert time.monotonic() < end, "Ray has removed no folder for a minute"
                    time.sleep(0.1)
            mark = home / "killed"
            if (step, rank) == config["kill"] and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    mode = train.CheckpointUploadMode.ASYNC
    try:
        report({}, {}, cfg="lossless", checkpoint_upload_mode=mode)
    except sp.BadArgumentError as e:
        (home.parent / "refusal.txt").write_text(str(e))


def main(folder: str, steps: str, seed: str) -> None:
    """Run the trainer."""
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    rng = random.Random(seed)
    paths = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as scratch:  # sockets need a short path
        ray.init(
            num_cpus=2, include_dashboard=False, _temp_dir=scratch, runtime_env={"env_vars": {"PYTHONPATH": paths}}
        )
        for name, kill in (("whole", None), ("killed", (rng.randint(7, int(steps)), rng.randrange(2)))):
            TorchTrainer(
                train_loop,
                train_loop_config={"folder": folder, "name": name, "steps": int(steps), "kill": kill},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(
                    name=name,
                    storage_path=f"{folder}/storage",
                    checkpoint_config=CheckpointConfig(num_to_keep=2),
                    failure_config=FailureConfig(max_failures=3),
                ),
            ).fit()
        ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Image classification in the shape of the CIFAR example: arguments, accelerator, a test at the end."""

import argparse
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--dtype", default="fp32", choices=["bf16", "fp16", "fp32"])
parser.add_argument("--stage", default=2, type=int)
args, _ = parser.parse_known_args()


def get_ds_config(args):
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-6, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 10},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16", "loss_scale": 0, "initial_scale_power": 15},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2 = nn.Linear(32, 24), nn.Linear(24, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x)))
        x = torch.relu(self.conv2(nn.functional.pad(x, (1, 2, 1, 2))))
        return self.fc2(torch.relu(self.fc1(self.pool(x).flatten(1))))


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    pixels, labels = torch.randn(count, 3, 8, 8, generator=generator), torch.randint(10, (count,), generator=generator)
    return torch.utils.data.TensorDataset(pixels, labels)


def test(model_engine, testset, local_device, target_dtype):
    right = total = 0
    model_engine.eval()
    with torch.no_grad():
        for pixels, labels in torch.utils.data.DataLoader(testset, batch_size=4):
            if target_dtype is not None:
                pixels = pixels.to(target_dtype)
            outputs = model_engine(pixels.to(local_device))
            right += int((outputs.argmax(1) == labels.to(local_device)).sum())
            total += len(labels)
    print("sum", right / total)


deepspeed.init_distributed()
_local_rank = int(os.environ.get("LOCAL_RANK", "-1"))
get_accelerator().set_device(_local_rank)
if torch.distributed.get_rank() != 0:
    torch.distributed.barrier()
trainset, testset = images(64, 0), images(16, 1)
if torch.distributed.get_rank() == 0:
    torch.distributed.barrier()
torch.manual_seed(0)
net = Net()
parameters = filter(lambda p: p.requires_grad, net.parameters())
model_engine, optimizer, trainloader, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=parameters, training_data=trainset, config=get_ds_config(args)
)
local_device = get_accelerator().device_name(model_engine.local_rank)
target_dtype = None
if model_engine.bfloat16_enabled():
    target_dtype = torch.bfloat16
elif model_engine.fp16_enabled():
    target_dtype = torch.half
criterion = nn.CrossEntropyLoss()
for _ in range(2):
    running_loss = 0.0
    for data in trainloader:
        inputs, labels = data[0].to(local_device), data[1].to(local_device)
        if target_dtype is not None:
            inputs = inputs.to(target_dtype)
        outputs = model_engine(inputs)
        loss = criterion(outputs, labels)
        model_engine.backward(loss)
        model_engine.step()
        running_loss += loss.item()
    mean = torch.tensor(running_loss)
    torch.distributed.all_reduce(mean)
    print("loss", float(mean) / torch.distributed.get_world_size())
test(model_engine, testset, local_device, target_dtype)

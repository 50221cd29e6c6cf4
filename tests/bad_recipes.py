"""Recipes with one mistake each. The line of the mistake ends in a comment with the recipe's name."""

TEXT = '''
import torch
from torch import nn
from torch.utils.data import DataLoader
import piper

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            with piper.annotate("PP"):
                x = layer(x).tanh()
        return x

def good(**changes):
    fields = dict(
        model=Net,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        data=lambda: [{"x": torch.ones(4, 4)}],
        steps=3,
    )
    return {**fields, **changes}

def batches(*changes):
    """Three batches, the third of them changed."""
    return [{"x": torch.ones(4, 4)}, {"x": torch.ones(4, 4)}, *changes]

# Recipes that are not recipes.

def needs_arguments(stages, width=4):  # needs_arguments
    return piper.Job(**good())

def returns_nothing():  # returns_nothing
    piper.Job(**good())

def returns_a_list():  # returns_a_list
    return [piper.Job(**good())]

def undefined():
    return piper.Job(**good(), clip_norm=maximum)  # undefined

def helper_raises():
    return piper.Job(**good(), optimizer=chosen("adam"))

def chosen(name):
    return {"sgd": torch.optim.SGD}[name]  # helper_raises

def leaves():
    raise SystemExit(3)  # leaves

def unknown_field():
    return piper.Job(**good(), epochs=3)  # unknown_field

not_a_function = piper.Job(**good())

# Fields of the wrong type or value.

def no_steps():
    return piper.Job(**good(steps=0))  # no_steps

def steps_as_text():
    return piper.Job(**good(steps="100"))  # steps_as_text

def half_a_step():
    return piper.Job(**good(steps=1.5))  # half_a_step

def seed_as_text():
    return piper.Job(**good(), seed="0")  # seed_as_text

def negative_seed():
    return piper.Job(**good(), seed=-1)  # negative_seed

def no_norm():
    return piper.Job(**good(), clip_norm=0.0)  # no_norm

def norm_as_text():
    return piper.Job(**good(), clip_norm="1")  # norm_as_text

def nan_norm():
    return piper.Job(**good(), clip_norm=float("nan"))  # nan_norm

def precision():
    return piper.Job(**good(), precision="fp16")  # precision

def built_model():
    return piper.Job(**good(model=Net()))  # built_model

def built_optimizer():
    optimizer = torch.optim.SGD(Net().parameters(), lr=0.1)
    return piper.Job(**good(), optimizer=optimizer)  # built_optimizer

def data_not_called():
    return piper.Job(**good(data=[{"x": torch.ones(4, 4)}]))  # data_not_called

def one_directive():
    return piper.Job(**good(), strategy=piper.place(piper.at(), [0]))  # one_directive

def nested_strategy():
    places = [piper.place(piper.at(PP=s), [s]) for s in range(2)]
    schedule = [piper.split(piper.at(), parts=2), piper.schedules.one_f_one_b(2, 2)]
    return piper.Job(**good(), strategy=[*places, *schedule])  # nested_strategy

def checkpoint_as_text():
    return piper.Job(**good(), checkpoint="checkpoints")  # checkpoint_as_text

def checkpoint_never():
    return piper.Job(**good(), checkpoint=piper.Checkpoint(folder="c", every=0))  # checkpoint_never

def checkpoint_often():
    return piper.Job(**good(), checkpoint=piper.Checkpoint(folder="c", every="2"))  # checkpoint_often

# Models and losses.

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, self.width)  # model_raises

def model_raises():
    return piper.Job(**good(model=Broken))

def model_is_none():
    return piper.Job(**good(model=lambda: None))

def model_needs_arguments():
    return piper.Job(**good(model=lambda width: Net()))

def loss_key_error():
    return piper.Job(**good(loss=lambda model, batch: model(batch["y"]).mean()))  # loss_key_error

def loss_shapes():
    return piper.Job(**good(loss=lambda model, batch: (model(batch["x"]) @ batch["x"][0, :2]).mean()))  # loss_shapes

def loss_takes_one():
    return piper.Job(**good(loss=lambda batch: batch["x"].mean()))

def loss_item():
    def loss(model, batch):
        return model(batch["x"]).mean().item()
    return piper.Job(**good(loss=loss))

def loss_number():
    return piper.Job(**good(loss=lambda model, batch: 0.5))

def loss_vector():
    return piper.Job(**good(loss=lambda model, batch: model(batch["x"]).mean(0)))

def loss_of_three():
    def loss(model, batch):
        mean = model(batch["x"]).mean()
        return mean, mean, mean
    return piper.Job(**good(loss=loss))

def loss_none():
    def loss(model, batch):
        model(batch["x"]).mean()
    return piper.Job(**good(loss=loss))

def loss_detached():
    return piper.Job(**good(loss=lambda model, batch: model(batch["x"]).detach().mean()))  # loss_detached

def loss_branches():
    def loss(model, batch):
        out = model(batch["x"])
        if out.sum() > 0:  # loss_branches
            return out.mean()
        return -out.mean()
    return piper.Job(**good(loss=loss))

# Data.

def data_none():
    return piper.Job(**good(data=lambda: None))  # data_none

def data_empty():
    return piper.Job(**good(data=lambda: []))  # data_empty

def data_of_one_batch():
    return piper.Job(**good(data=lambda: {"x": torch.ones(4, 4)}))  # data_of_one_batch

def data_raises():
    def data():
        return open("missing.bin")  # data_raises
    return piper.Job(**good(data=data))

def data_raises_at_once():
    def data():
        yield {"x": torch.ones(4, width)}  # data_raises_at_once
    return piper.Job(**good(data=data))

def data_raises_later():
    def rows(count):
        if count == 3:
            raise RuntimeError("the third file is truncated")  # data_raises_later
        return torch.ones(4, 4)
    def data():
        for count in (1, 2, 3):
            yield {"x": rows(count)}
    return piper.Job(**good(data=data))

class Rows:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {"x": torch.ones(4) / [1, 0][index]}  # dataset_raises

def dataset_raises():
    return piper.Job(**good(data=lambda: DataLoader(Rows(), batch_size=4)))

def data_ends():
    spent = iter(batches())
    return piper.Job(**good(data=lambda: spent))  # data_ends

def data_of_tuples():
    return piper.Job(**good(data=lambda: [(torch.ones(4, 4), torch.ones(4))]))  # data_of_tuples

def data_of_text():
    return piper.Job(**good(data=lambda: [{"x": torch.ones(4, 4), "name": ["a", "b", "c", "d"]}]))  # data_of_text

def data_of_text_later():
    return piper.Job(**good(data=lambda: batches({"x": "text"})))  # data_of_text_later

def data_without_samples():
    return piper.Job(**good(data=lambda: [{"x": torch.tensor(1.0)}]))  # data_without_samples

def data_ragged():
    return piper.Job(**good(data=lambda: [{"x": torch.ones(4, 4), "y": torch.ones(3)}]))  # data_ragged

def data_smaller_later():
    return piper.Job(**good(data=lambda: batches({"x": torch.ones(3, 4)})))

def data_type_later():
    return piper.Job(**good(data=lambda: batches({"x": torch.ones(4, 4, dtype=torch.int64)})))

def data_field_later():
    return piper.Job(**good(data=lambda: batches({"x": torch.ones(4, 4), "y": torch.ones(4)})))

def data_missing_later():
    return piper.Job(**good(data=lambda: batches({"y": torch.ones(4, 4)})))

def data_does_not_divide():
    return piper.Job(**good(), strategy=[piper.split(piper.at(), parts=3)])

# Optimizers and schedulers.

def optimizer_raises():
    return piper.Job(**good(), optimizer=lambda params: torch.optim.SGD(params, lr=-1.0))  # optimizer_raises

def optimizer_none():
    def optimizer(params):  # optimizer_none
        torch.optim.SGD(params, lr=0.1)
    return piper.Job(**good(), optimizer=optimizer)

def optimizer_lbfgs():
    return piper.Job(**good(), optimizer=lambda params: torch.optim.LBFGS(params, lr=0.1))  # optimizer_lbfgs

class Rateless(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"speed": 0.1})
    def step(self, closure=None):
        pass

def optimizer_without_lr():
    return piper.Job(**good(), optimizer=lambda params: Rateless(params))  # optimizer_without_lr

class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise ZeroDivisionError("no gradients")  # optimizer_step

def optimizer_step():
    return piper.Job(**good(), optimizer=lambda params: Failing(params, lr=0.1))

def optimizer_muon():
    optimizer = lambda params: torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.1)  # optimizer_muon
    return piper.Job(**good(), optimizer=optimizer, strategy=[piper.replicate(piper.at(), [0, 1], zero=1)])

def scheduled(scheduler):
    optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
    return piper.Job(**good(), optimizer=optimizer, scheduler=scheduler)

def scheduler_raises():
    return scheduled(lambda o: torch.optim.lr_scheduler.StepLR(o))  # scheduler_raises

def scheduler_none():
    return scheduled(lambda o: None)  # scheduler_none

def scheduler_plateau():
    return scheduled(lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o))  # scheduler_plateau

def scheduler_fails():
    def factor(step):
        return 1 / (2 - step)  # scheduler_fails
    return scheduled(lambda o: torch.optim.lr_scheduler.LambdaLR(o, factor))

def scheduler_ends():
    return scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=2))  # scheduler_ends

def scheduler_ends_later():
    return scheduled(lambda o: Lasting(o, 2))  # scheduler_ends_later

class Lasting(torch.optim.lr_scheduler.ConstantLR):
    def step(self):
        if self.last_epoch >= self.total_iters:
            raise IndexError("the schedule has ended")  # lasting
        super().step()

# Strategies.

def device_of_text():
    return piper.Job(**good(), strategy=[piper.place(piper.at(), "0")])  # device_of_text

def no_such_stage():
    return piper.Job(**good(), strategy=[piper.place(piper.at(PP=2), [0])])  # no_such_stage

def no_such_strategy():
    return piper.Job(**good(), strategy="missing.json")

def strategy_not_json():
    return piper.Job(**good(), strategy="broken.json")

def strategy_unknown_op():
    return piper.Job(**good(), strategy="op.json")

def strategy_unknown_key():
    return piper.Job(**good(), strategy="key.json")

def fine():
    return piper.Job(**good())

def fine_saved():
    return piper.Job(**good(), checkpoint=piper.Checkpoint(folder="checkpoints"))
'''

FILES = {
    "broken.json": '[\n  {"op": "place", "filter": {"PP": 0}, "devices": [0]},\n  {"op": "place"\n]\n',
    "op.json": '[{"op": "replace", "filter": {}, "devices": [0]}]\n',
    "key.json": '[{"op": "place", "filter": {}, "devices": [0], "device": 1}]\n',
    "syntax.py": "import piper\n\ndef job(:\n    return piper.Job()\n",
    "imports.py": "import piper\nimport a_module_that_is_not_there\n",
    "raises.py": "import piper\n\nWIDTH = int('wide')\n",
    "text.txt": "not Python\n",
}


def line_of(name: str) -> int:
    """Return the number of the line that ends in a recipe's name."""
    found = [n for n, line in enumerate(TEXT.splitlines(), 1) if line.endswith(f"# {name}")]
    assert len(found) == 1, f"{name} marks {len(found)} lines"
    return found[0]

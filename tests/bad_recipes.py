"""Recipes with one mistake each. The line of the mistake ends in a comment with the recipe's name.

`MESSAGES` has what `piper train` says of each, where `net.py:<name>` stands for the number of that line.
"""

TEXT = '''
import torch
from torch import nn
from torch.utils.data import DataLoader
import piper
import piper.data

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
    return piper.Job(**good(), optimizer=chosen("adam"))  # caller of chosen

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

def model_raises_later():
    built = []
    def model():
        built.append(Net())
        if len(built) > 1:
            raise OSError("the weights are gone")  # model_raises_later
        return built[0]
    return piper.Job(**good(model=model))

def model_is_none():
    return piper.Job(**good(model=lambda: None))  # model_is_none

def model_needs_arguments():
    return piper.Job(**good(model=lambda width: Net()))  # model_needs_arguments

def loss_key_error():
    return piper.Job(**good(loss=lambda model, batch: model(batch["y"]).mean()))  # loss_key_error

def loss_shapes():
    return piper.Job(**good(loss=lambda model, batch: (model(batch["x"]) @ batch["x"][0, :2]).mean()))  # loss_shapes

def loss_takes_one():
    return piper.Job(**good(loss=lambda batch: batch["x"].mean()))  # loss_takes_one

def annotates_with_an_index():
    def loss(model, batch):
        with piper.annotate("PP", 1):  # annotates_with_an_index
            return model(batch["x"]).mean()
    return piper.Job(**good(loss=loss))

def loss_item():
    def loss(model, batch):  # loss_item
        return model(batch["x"]).mean().item()
    return piper.Job(**good(loss=loss))

def loss_number():
    return piper.Job(**good(loss=lambda model, batch: 0.5))  # loss_number

def loss_vector():
    return piper.Job(**good(loss=lambda model, batch: model(batch["x"]).mean(0)))  # loss_vector

def loss_of_three():
    def loss(model, batch):  # loss_of_three
        mean = model(batch["x"]).mean()
        return mean, mean, mean
    return piper.Job(**good(loss=loss))

def loss_none():
    def loss(model, batch):  # loss_none
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
            yield {"x": rows(count)}  # caller of rows
    return piper.Job(**good(data=data))

class Rows:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {"x": torch.ones(4) / [1, 0][index]}  # dataset_raises

def dataset_raises():
    return piper.Job(**good(data=lambda: DataLoader(Rows(), batch_size=4)))

def worker_raises():
    return piper.Job(**good(data=lambda: DataLoader(Rows(), batch_size=4, num_workers=1)))

class Once:
    def __iter__(self):
        raise OSError("the server is gone")  # iter_raises

def iter_raises():
    return piper.Job(**good(data=Once))

def samples_of_tuples():
    return piper.Job(**good(data=lambda: piper.data.Samples([(1, 2)] * 8, batch=4)))  # samples_of_tuples

def no_token_file():
    return piper.Job(**good(data=lambda: piper.data.TokenFile("missing.bin", 8, batch=4)))  # no_token_file

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

def data_wider_later():
    return piper.Job(**good(data=lambda: batches({"x": torch.ones(4, 5)})))  # data_wider_later

def data_type_later():
    return piper.Job(**good(data=lambda: batches({"x": torch.ones(4, 4, dtype=torch.int64)})))  # data_type_later

def data_field_later():
    return piper.Job(**good(data=lambda: batches({"x": torch.ones(4, 4), "y": torch.ones(4)})))  # data_field_later

def data_missing_later():
    return piper.Job(**good(data=lambda: batches({"y": torch.ones(4, 4)})))  # data_missing_later

def data_does_not_divide():
    return piper.Job(**good(), strategy=[piper.split(piper.at(), parts=3)])  # data_does_not_divide

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
    return scheduled(lambda o: Lasting(o, total_iters=2))

class Lasting(torch.optim.lr_scheduler.ConstantLR):
    def step(self):
        if self.last_epoch >= self.total_iters:
            raise IndexError("the schedule has ended")  # scheduler_ends_later
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


MESSAGES = {
    "net.py:needs_arguments": """
error: net.py:<needs_arguments>: needs_arguments() needs arguments, and a recipe is called with none
  needs: stages
  hint:  give each argument a default value
""",
    "net.py:returns_nothing": """
error: net.py:<returns_nothing>: returns_nothing() returned NoneType, not a Job
  hint: end the function with `return piper.Job(...)`
""",
    "net.py:returns_a_list": """
error: net.py:<returns_a_list>: returns_a_list() returned list, not a Job
  hint: end the function with `return piper.Job(...)`
""",
    "net.py:undefined": """
error: net.py:<undefined>: undefined() failed
  why:  NameError: name 'maximum' is not defined
  hint: fix the recipe at that line
""",
    "net.py:helper_raises": """
error: net.py:<helper_raises>: helper_raises() failed
  why:   KeyError: 'adam'
  trace: net.py:<caller of chosen> in helper_raises: return piper.Job(**good(), optimizer=chosen("adam"))  # caller of chosen
         net.py:<helper_raises> in chosen: return {"sgd": torch.optim.SGD}[name]  # helper_raises
  hint:  fix the recipe at that line
""",
    "net.py:leaves": """
error: net.py:<leaves>: leaves() failed
  why:  SystemExit: 3
  hint: fix the recipe at that line
""",
    "net.py:unknown_field": """
error: net.py:<unknown_field>: unknown_field() failed
  why:  TypeError: Job.__init__() got an unexpected keyword argument 'epochs'
  hint: fix the recipe at that line
""",
    "net.py:no_steps": """
error: Job (net.py:<no_steps>): steps=0
  hint: train at least 1 step, a whole number
""",
    "net.py:steps_as_text": """
error: Job (net.py:<steps_as_text>): steps='100'
  hint: train at least 1 step, a whole number
""",
    "net.py:half_a_step": """
error: Job (net.py:<half_a_step>): steps=1.5
  hint: train at least 1 step, a whole number
""",
    "net.py:seed_as_text": """
error: Job (net.py:<seed_as_text>): seed='0'
  hint: choose a whole number from 0
""",
    "net.py:negative_seed": """
error: Job (net.py:<negative_seed>): seed=-1
  hint: choose a whole number from 0
""",
    "net.py:no_norm": """
error: Job (net.py:<no_norm>): clip_norm=0.0
  hint: clip to a positive norm, or leave it out
""",
    "net.py:norm_as_text": """
error: Job (net.py:<norm_as_text>): clip_norm='1'
  hint: clip to a positive norm, or leave it out
""",
    "net.py:nan_norm": """
error: Job (net.py:<nan_norm>): clip_norm=nan
  hint: clip to a positive norm, or leave it out
""",
    "net.py:precision": """
error: Job (net.py:<precision>): there is no precision 'fp16'
  hint: precision is one of fp32, bf16, fp64
""",
    "net.py:built_model": """
error: Job (net.py:<built_model>): model is a Net that is built already
  hint: give a function that builds the model: model=MyModel or model=lambda: MyModel(8)
""",
    "net.py:built_optimizer": """
error: Job (net.py:<built_optimizer>): optimizer is SGD, which cannot be called
  hint: give a function: optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
""",
    "net.py:data_not_called": """
error: Job (net.py:<data_not_called>): data is list, which cannot be called
  hint: give a function that returns the batches: data=lambda: loader
""",
    "net.py:one_directive": """
error: Job (net.py:<one_directive>): strategy is Place, not a list of directives
  hint: put directives in a list, or give the path of a JSON file
""",
    "net.py:nested_strategy": """
error: Job (net.py:<nested_strategy>): strategy[3] is list, not a directive
  hint: a strategy is a flat list of place, replicate, shard, split, order, remat, precision, protect, offload, average; add a schedule with +, not inside the list
""",
    "net.py:checkpoint_as_text": """
error: Job (net.py:<checkpoint_as_text>): checkpoint is str, not a Checkpoint
  hint: give a piper.Checkpoint(folder="checkpoints"), or leave it out
""",
    "net.py:checkpoint_never": """
error: Checkpoint (net.py:<checkpoint_never>): every=0
  hint: save every so many steps, at least 1
""",
    "net.py:checkpoint_often": """
error: Checkpoint (net.py:<checkpoint_often>): every='2'
  hint: save every so many steps, at least 1
""",
    "net.py:model_raises": """
error: capture (net.py:<model_raises>): the model cannot be built
  why:  AttributeError: 'Broken' object has no attribute 'width'
  hint: build the model alone, without Piper, to see the whole traceback
""",
    "net.py:model_raises_later": """
error: model (net.py:<model_raises_later>): the model cannot be built
  why:  OSError: the weights are gone
  hint: it was built once without memory, and now with values: fix the model at that line
""",
    "net.py:samples_of_tuples": """
error: Samples (net.py:<samples_of_tuples>): a sample is tuple, not a dict
  hint: give samples such as {"tokens": ..., "labels": ...}
""",
    "net.py:no_token_file": """
error: missing.bin (net.py:<no_token_file>): the token file cannot be read
  why:  No such file or directory
  hint: write one with piper.data.write_tokens, or fix the path
""",
    "net.py:model_is_none": """
error: model (net.py:<model_is_none>): the model is not a module
  got:  NoneType
  hint: model is a function that returns an nn.Module: model=lambda: Decoder(config)
""",
    "net.py:model_needs_arguments": """
error: capture (net.py:<model_needs_arguments>): the model cannot be built
  why:  TypeError: model_needs_arguments.<locals>.<lambda>() missing 1 required positional argument: 'width'
  hint: build the model alone, without Piper, to see the whole traceback
""",
    "net.py:loss_key_error": """
error: capture (net.py:<loss_key_error>): the loss, or the model in it, raised an exception
  why:   KeyError('y')
  batch: x (4, 4)
  hint:  the batch has 'x': use one of these names, or add the field in data()
""",
    "net.py:loss_shapes": """
error: capture (net.py:<loss_shapes>): the loss, or the model in it, raised an exception
  why:   RuntimeError('size mismatch, got input (4x4), vec (2)')
  batch: x (4, 4)
  hint:  call loss(model(), batch) without Piper to see the whole traceback, and if that works, under torch.compile
""",
    "net.py:loss_takes_one": """
error: capture (net.py:<loss_takes_one>): the loss, or the model in it, raised an exception
  why:   Argument mismatch when attempting to trace function <lambda>.
  batch: x (4, 4)
  hint:  the loss is called as loss(model, batch)
""",
    "net.py:annotates_with_an_index": """
error: capture (net.py:<annotates_with_an_index>): the loss, or the model in it, raised an exception
  why:   Argument mismatch when attempting to trace function annotate.
  batch: x (4, 4)
  hint:  call loss(model(), batch) without Piper to see the whole traceback, and if that works, under torch.compile
""",
    "net.py:loss_item": """
error: loss (net.py:<loss_item>): the loss is not a loss
  got:  it returns a Python number
  hint: return a scalar tensor (a mean), or a tuple (sum, weight) of two scalar tensors
""",
    "net.py:loss_number": """
error: loss (net.py:<loss_number>): the loss is not a loss
  got:  it returns no tensor
  hint: return a scalar tensor (a mean), or a tuple (sum, weight) of two scalar tensors
""",
    "net.py:loss_vector": """
error: loss (net.py:<loss_vector>): the loss is not a loss
  got:  its loss has shape [4]
  hint: return a scalar tensor (a mean), or a tuple (sum, weight) of two scalar tensors
""",
    "net.py:loss_of_three": """
error: loss (net.py:<loss_of_three>): the loss is not a loss
  got:  it returns (a tensor, a tensor, a tensor)
  hint: return a scalar tensor (a mean), or a tuple (sum, weight) of two scalar tensors
""",
    "net.py:loss_none": """
error: loss (net.py:<loss_none>): the loss is not a loss
  got:  it returns no tensor
  hint: return a scalar tensor (a mean), or a tuple (sum, weight) of two scalar tensors
""",
    "net.py:loss_detached": """
error: loss (net.py:<loss_detached>): the loss does not depend on any trainable parameter
  hint: check for detach(), no_grad() and requires_grad=False between the parameters and the loss
""",
    "net.py:loss_branches": """
error: capture (net.py:<loss_branches>): the model and its loss cannot be captured
  why:   Detected data-dependent branching (e.g. `if my_tensor.sum() > 0:`). Dynamo does not support tracing dynamic control flow.
  batch: x (4, 4)
  hint:  the loss must trace as one graph: no branch on a tensor's value, no .item(), no files inside
""",
    "net.py:data_none": """
error: data (net.py:<data_none>): data() returned NoneType, which cannot be iterated
  hint: return the batches: a list, a generator or a DataLoader of dicts of tensors
""",
    "net.py:data_empty": """
error: data (net.py:<data_empty>): data() holds no batch
  hint: return at least one batch
""",
    "net.py:data_of_one_batch": """
error: data (net.py:<data_of_one_batch>): data() returned one dict, not batches
  hint: return the batches: data=lambda: [batch], a generator or a DataLoader of dicts of tensors
""",
    "net.py:data_raises": """
error: data (net.py:<data_raises>): data() failed
  at:   the call of data()
  why:  FileNotFoundError: [Errno 2] No such file or directory: 'missing.bin'
  hint: fix the data at that line
""",
    "net.py:data_raises_at_once": """
error: data (net.py:<data_raises_at_once>): data() failed
  at:   the batch of step 1
  why:  NameError: name 'width' is not defined
  hint: fix the data at that line
""",
    "net.py:data_raises_later": """
error: data (net.py:<data_raises_later>): data() failed
  at:    the batch of step 3
  why:   RuntimeError: the third file is truncated
  trace: net.py:<caller of rows> in data: yield {"x": rows(count)}  # caller of rows
         net.py:<data_raises_later> in rows: raise RuntimeError("the third file is truncated")  # data_raises_later
  hint:  fix the data at that line
""",
    "net.py:dataset_raises": """
error: data (net.py:<dataset_raises>): data() failed
  at:   the batch of step 1
  why:  IndexError: list index out of range
  hint: fix the data at that line
""",
    "net.py:worker_raises": """
error: data (net.py:<dataset_raises>): data() failed
  at:   the batch of step 1
  why:  IndexError: list index out of range
  hint: fix the data at that line
""",
    "net.py:iter_raises": """
error: data (net.py:<iter_raises>): data() failed
  at:   the beginning of an epoch
  why:  OSError: the server is gone
  hint: fix the data at that line
""",
    "net.py:data_ends": """
error: data (net.py:<data_ends>): data() returns the same iterator each time, so its first batch would be lost to compile
  hint: let each call make the batches: `def data(): yield from ...`, or return a list or a loader
""",
    "net.py:data_of_tuples": """
error: data (net.py:<data_of_tuples>): a batch is not a dict of tensors
  at:   the batch of step 1
  got:  tuple
  hint: yield batches such as {"tokens": ..., "labels": ...}, whose first axis is the samples; leave texts and lists out
""",
    "net.py:data_of_text": """
error: data (net.py:<data_of_text>): a batch is not a dict of tensors
  at:   the batch of step 1
  got:  x: Tensor, name: list
  hint: yield batches such as {"tokens": ..., "labels": ...}, whose first axis is the samples; leave texts and lists out
""",
    "net.py:data_of_text_later": """
error: data (net.py:<data_of_text_later>): a batch is not a dict of tensors
  at:   the batch of step 3
  got:  x: str
  hint: yield batches such as {"tokens": ..., "labels": ...}, whose first axis is the samples; leave texts and lists out
""",
    "net.py:data_without_samples": """
error: data (net.py:<data_without_samples>): a batch is not a dict of tensors
  at:   the batch of step 1
  got:  x: a tensor without axes
  hint: yield batches such as {"tokens": ..., "labels": ...}, whose first axis is the samples; leave texts and lists out
""",
    "net.py:data_ragged": """
error: data (net.py:<data_ragged>): the fields of a batch disagree on the number of samples
  at:   the batch of step 1
  x:    4 samples
  y:    3 samples
  hint: the first axis of every field is the samples
""",
    "net.py:data_wider_later": """
error: capture (net.py:15): the loss, or the model in it, raised an exception
  why:   RuntimeError('a and b must have same reduction dim, but got [4, 5] X [4, 4].')
  batch: x (4, 5)
  hint:  call loss(model(), batch) without Piper to see the whole traceback, and if that works, under torch.compile
""",
    "net.py:data_type_later": """
error: data (net.py:<data_type_later>), step 3: the batch is not like the one that was compiled
  wanted: x of a floating type
  got:    x of int64
  hint:   give every step a batch of the same fields and types, of the same number of axes; sizes may differ
""",
    "net.py:data_field_later": """
error: data (net.py:<data_field_later>), step 3: the batch is not like the one that was compiled
  wanted: x
  got:    also y
  hint:   give every step a batch of the same fields and types, of the same number of axes; sizes may differ
""",
    "net.py:data_missing_later": """
error: data (net.py:<data_missing_later>), step 3: the batch is not like the one that was compiled
  wanted: x (4, 4)
  got:    no such field
  hint:   give every step a batch of the same fields and types, of the same number of axes; sizes may differ
""",
    "net.py:data_does_not_divide": """
error: strategy (net.py:<data_does_not_divide>): 4 samples do not divide into 3 equal pieces
  devices: 1 slices of the samples
  parts:   3 in each slice (MB=3)
  hint:    use a batch that is a multiple of 3, fewer parts or fewer devices
""",
    "net.py:optimizer_raises": """
error: optimizer (net.py:<optimizer_raises>): optimizer() failed
  why:  ValueError: Invalid learning rate: -1.0
  hint: it is called with a list of all parameters: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)
""",
    "net.py:optimizer_none": """
error: optimizer (net.py:<optimizer_none>): optimizer() returned NoneType, not an optimizer
  hint: return one: optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)
""",
    "net.py:optimizer_lbfgs": """
error: optimizer (net.py:<optimizer_lbfgs>): LBFGS cannot be used: its step() needs a closure
  why:  a closure computes the loss again within one step, and a plan computes it once
  hint: use an optimizer whose step() takes no arguments, such as AdamW or SGD
""",
    "net.py:optimizer_without_lr": """
error: optimizer (net.py:<optimizer_without_lr>): Rateless has no learning rate
  groups: keys are params, speed
  hint:   give every group of parameters an "lr": metrics and schedulers read it there
""",
    "net.py:optimizer_step": """
error: optimizer (net.py:<optimizer_step>): Failing.step() failed
  why:  ZeroDivisionError: no gradients
  hint: fix the optimizer at that line
""",
    "net.py:scheduler_raises": """
error: scheduler (net.py:<scheduler_raises>): scheduler() failed
  why:  TypeError: StepLR.__init__() missing 1 required positional argument: 'step_size'
  hint: it is called with the optimizer: scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)
""",
    "net.py:scheduler_none": """
error: scheduler (net.py:<scheduler_none>): scheduler() returned NoneType, not a scheduler
  missing: step, state_dict, load_state_dict
  hint:    return one: scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)
""",
    "net.py:scheduler_plateau": """
error: scheduler (net.py:<scheduler_plateau>): ReduceLROnPlateau cannot be used: its step() needs a metric
  why:  devices step their schedulers without one, so that all have the same rate
  hint: use a scheduler of the step alone: scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)
""",
    "net.py:scheduler_fails": """
error: scheduler (net.py:<scheduler_fails>): LambdaLR cannot go on
  at:   step 2
  why:  ZeroDivisionError: division by zero
  hint: fix the scheduler at that line, or let its schedule be as long as the job's steps
""",
    "net.py:scheduler_ends": """
error: scheduler (net.py:<scheduler_ends>): OneCycleLR cannot go on
  at:   step 3
  why:  ValueError: Tried to step 3 times. The specified number of total steps is 2
  hint: fix the scheduler at that line, or let its schedule be as long as the job's steps
""",
    "net.py:scheduler_ends_later": """
error: scheduler (net.py:<scheduler_ends_later>): Lasting cannot go on
  at:   step 3
  why:  IndexError: the schedule has ended
  hint: fix the scheduler at that line, or let its schedule be as long as the job's steps
""",
    "net.py:device_of_text": """
error: place (net.py:<device_of_text>): devices='0' is not a list
  hint: list the devices in order: devices=[0, 1]
""",
    "net.py:no_such_stage": """
error: place #0 (net.py:<no_such_stage>): the filter matches no node
  asked: at(PP=2)
  known: PP=0..1
  hint:  use an index that exists; only an order that asks for halves makes a backward BI and BW
""",
    "net.py:no_such_strategy": """
error: missing.json: the strategy cannot be read
  why:  No such file or directory
  hint: give the path of a JSON file
""",
    "net.py:strategy_not_json": """
error: broken.json:4: this is not JSON
  column: 1
  why:    Expecting ',' delimiter
  hint:   a strategy is a list of objects: [{"op": "place", "filter": {"PP": 0}, "devices": [0]}]
""",
    "net.py:strategy_unknown_op": """
error: op.json[0]: there is no directive 'replace'
  known: place, replicate, shard, split, order, remat, precision, protect, offload, average
  hint:  did you mean 'place'?
""",
    "net.py:strategy_unknown_key": """
error: key.json[0]: place has no key 'device'
  known: filter, devices, stream
  hint:  did you mean 'devices'?
""",
    "net.py:not_a_function": """
error: net.py: not_a_function is Job, not a function
  has:  Net, good, batches, needs_arguments, returns_nothing, returns_a_list, undefined, helper_raises, chosen, leaves, unknown_field, no_steps, steps_as_text, half_a_step, seed_as_text, negative_seed and 75 more
  hint: name a function that returns a piper.Job
""",
    "net.py:fnie": """
error: net.py: there is no function 'fnie'
  has:  Net, good, batches, needs_arguments, returns_nothing, returns_a_list, undefined, helper_raises, chosen, leaves, unknown_field, no_steps, steps_as_text, half_a_step, seed_as_text, negative_seed and 75 more
  hint: did you mean 'fine'?
""",
    "net.py": """
error: net.py: this is not a recipe
  hint: name the file and the function: piper plan recipes/dense.py:pp
""",
    "missing.py:job": """
error: missing.py: there is no such file
  hint: give the path of a Python file, then :function
""",
    "text.txt:job": """
error: text.txt: this is not a Python file
  hint: give the path of a .py file
""",
    "syntax.py:job": """
error: syntax.py:3: the file cannot be imported
  why:  SyntaxError: invalid syntax (syntax.py, line 3)
  hint: fix the recipe at that line
""",
    "imports.py:job": """
error: imports.py:2: the file cannot be imported
  why:  ModuleNotFoundError: No module named 'a_module_that_is_not_there'
  hint: fix the recipe at that line
""",
    "raises.py:job": """
error: raises.py:3: the file cannot be imported
  why:  ValueError: invalid literal for int() with base 10: 'wide'
  hint: fix the recipe at that line
""",
    "net.py:fine --resume": """
error: --resume: the job saves no checkpoints, so there is nothing to go on from
  hint: let the job save: piper.Job(..., checkpoint=piper.Checkpoint(folder="checkpoints"))
""",
    "net.py:fine --on lokal": """
error: piper train: there is no launcher 'lokal'
  hint: on is one of inline, local, ray, torchrun, rank:N; did you mean 'local'?
""",
    "net.py:fine --on rank:7": """
error: rank:7: there is no device '7'
  devices: 0 to 0
  hint:    name one of the plan's devices: --on rank:0
""",
    "net.py:fine --device tpu": """
error: device: there is no device 'tpu'
  hint: device is one of cpu, cuda
""",
    "net.py:fine --steps 0": """
error: piper train: --steps 0
  hint: train at least 1 step
""",
    "net.py:fine --steps 4 --profile 9": """
error: piper train: --profile 9 needs 11 steps
  run:   4 steps to take
  first: 2 steps pass before the recording begins
  hint:  train longer with --steps, or record less
""",
    "net.py:fine --out net.py": """
error: net.py: the run's folder cannot be written
  why:  File exists
  hint: name a folder you own, on a disk with room: --out DIR
""",
}


def line_of(name: str) -> int:
    """Return the number of the line that ends in a recipe's name."""
    found = [n for n, line in enumerate(TEXT.splitlines(), 1) if line.endswith(f"# {name}")]
    assert len(found) == 1, f"{name} marks {len(found)} lines"
    return found[0]

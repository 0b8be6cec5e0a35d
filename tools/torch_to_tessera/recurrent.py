"""nn.LSTM, nn.GRU and nn.RNN, unrolled."""

import dataclasses
import math

import torch

from .dimensions import Atom, wide
from .functions import number_of
from .layout import apart, compact, one_atom
from .problems import Unmappable
from .values import Act, Value

MOST_STEPS = 256  # of an unrolled layer (planner/ops/steps.cc)


@dataclasses.dataclass
class States(Value):
    """The last states of recurrent layers, an Act for each and each
    direction."""
    described = "the states of several layers, of which one can be read"
    of: list

    def act(self, walk):
        if len(self.of) > 1:
            return None
        return self.of[0].viewed([[], *self.of[0].dims])

    def piece(self, walk, node, dim, start, stop, dropped):
        return self.of[start] if dropped and dim == 0 else None


def recurrent(cell):
    """nn.LSTM, nn.GRU or nn.RNN, unrolled: step after step, layer after layer.
    PyTorch's two biases stay two."""
    def unrolled(walk, node, x, first, params, has_biases, layers, dropout,
                 training, both_ways, batch_first):
        order = [0, 1, 2] if batch_first else [1, 0, 2]
        x = sequence(walk, node, x, order)
        count, directions = x.own[1].extent, 2 if both_ways else 1
        each = 4 if has_biases else 2
        if len(params) != layers * directions * each:
            raise Unmappable("a layer whose states are projected")
        given = first if isinstance(first, list) and cell == "lstm" else [first]
        states = [first_states(states, layers * directions) for states in given]
        steps = walk.add(
            "unstack", node, [x.tensor],
            "bd!h->" + ",".join(["bh"] * count), suffix="steps", steps=count,
            alike=True)
        last = [[] for _ in states]
        # Whether an LSTM's last cells are read.
        keeps = any(user.args[1] == 2 and user.users for user in node.users)
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                k = layer * directions + direction
                run = Cell(walk, node, cell, params[k * each:(k + 1) * each], k)
                backward = direction == 1
                made, state = run(steps[::-1] if backward else steps,
                                  [of[k] for of in states], keeps)
                outputs.append(made[::-1] if backward else made)
                for of, value in zip(last, state if keeps else state[:1]):
                    of.append(Act(value, [walk.batch, run.h],
                                  [[walk.batch], [run.h]]))
            steps = both(walk, node, layer, outputs, run.h.extent)
            if dropout and training and layer + 1 < layers:
                steps = dropped(walk, node, layer, steps, dropout)
        y = walk.add("stack", node, steps, ",".join(["bh"] * count) + "->bd!h",
                     suffix="outputs", sizes={"d": count}, steps=count)[0]
        h = Atom(f"{node.name}.outputs", directions * run.h.extent, "f")
        s = x.own[1]
        y = apart(walk, node, Act(y, [walk.batch, s, h], [[walk.batch], [s],
                                                          [h]]), 2)
        return [y.viewed([y.dims[d] for d in order]), *map(States, last)]
    return unrolled


def one_step(cell):
    """nn.LSTMCell, nn.GRUCell or nn.RNNCell: a step of a loop of one's own."""
    def step(walk, node, x, first, *params):
        given = first if cell == "lstm" else [first]
        x, *states = (one_state(walk, node, value) for value in (x, *given))
        if x is None:
            raise Unmappable("a step that reads zeros")
        params = [param for param in params if param is not None]
        keeps = cell == "lstm" and any(user.args[1] == 1 and user.users
                                       for user in node.users)
        run = Cell(walk, node, cell, params, 0)
        _, made = run([x], states, keeps)
        made = [apart(walk, node, Act(value, [walk.batch, run.h],
                                      [[walk.batch], [run.h]]), 1)
                if value else None for value in made]
        return made if cell == "lstm" else made[0]
    return step


def one_state(walk, node, value):
    """Features of samples, as a tensor; None where they are zero."""
    if isinstance(value, torch.Tensor) and number_of(value) == 0:
        return None
    x = walk.act(value)
    if len(x.dims) != 2 or x.dims[0] != [walk.batch]:
        raise Unmappable(f"expected features of each sample, found {x.shape}")
    return one_atom(walk, node, compact(walk, node, x), 1).tensor


def sequence(walk, node, x, order):
    """x as (batch, steps, features)."""
    x = walk.act(x)
    x = compact(walk, node, x.viewed([
        wide(x.dims[d]) or x.dims[d][:1] for d in order]))
    if [len(dim) for dim in x.dims] != [1, 1, 1] or len(x.own) != 3 or (
            x.own[0] != walk.batch):
        raise Unmappable(f"expected a sequence of features, found {x.shape}")
    if x.own[1].extent > MOST_STEPS:
        raise Unmappable(f"{x.own[1].extent} steps: at most {MOST_STEPS}")
    return x


def both(walk, node, layer, outputs, hidden):
    """The outputs of a layer's directions, as one for each step."""
    if len(outputs) == 1:
        return outputs[0]
    return [walk.add("concat_channels", node, pair, "bm!,bn!->bd!",
                     suffix=f"{layer}.both", channels=2 * hidden,
                     sizes={"d": 2 * hidden})[0] for pair in zip(*outputs)]


def dropped(walk, node, layer, steps, probability):
    made = []
    for i, step in enumerate(steps):
        made += walk.add("dropout", node, [step], "bh->bh",
                         suffix=f"{layer}.dropout.{i}",
                         probability=probability, salt=walk.graph.salts)
        walk.graph.salts += 1
    return made


def first_states(value, count):
    """Tensors of a layer and direction each; None where they are zero."""
    if isinstance(value, States):
        if len(value.of) != count:
            raise Unmappable(f"{len(value.of)} first states, of {count}")
        return [x.tensor for x in value.of]
    if isinstance(value, torch.Tensor) and number_of(value) == 0:
        return [None] * count
    raise Unmappable("first states that are neither zeros nor another layer's")


class Cell:
    """One direction of a layer."""

    def __init__(self, walk, node, cell, params, k):
        self.walk, self.node, self.cell, self.k = walk, node, cell, k
        gates = {"lstm": 4, "gru": 3}.get(cell)
        hidden = params[1].shape[1]
        self.h = Atom(f"{node.name}.{k}.hidden", hidden, "h")
        stddev = walk.stddev(1 / math.sqrt(3 * hidden))

        def weight(param, start=0, stop=None, suffix=""):
            shape = [gates, hidden] if gates else [hidden]
            shape += param.shape[1:]
            views = param.views + (("reshape", (shape,)),)
            rows = ()
            if stop is not None:
                rows, shape = (slice(start, stop),), [stop - start, *shape[1:]]
                shape = shape[1:] if shape[0] == 1 else shape
            return walk.graph.weight(
                param.label + suffix, shape,
                (dataclasses.replace(param, views=views), rows),
                stddev=stddev if len(param.shape) > 1 else 0)

        self.of_x, self.of_h = map(weight, params[:2])
        self.biases = [None, None]
        self.candidate = None
        if len(params) > 2 and cell == "gru":
            self.biases[0] = weight(params[2])
            # The candidate's bias is scaled by a gate, those of the gates not.
            self.candidate = weight(params[3], 2, 3, "/candidate")
            of_gates = weight(params[3], 0, 2, "/gates")
            self.of_gates = walk.add(
                "pad", node, [of_gates], "m!j->d!j", suffix=f"{k}.bias",
                sizes={"d": 3}, before=0, places=3, value=0)[0]
        elif len(params) > 2:
            self.biases = [weight(param) for param in params[2:]]
        elif cell == "gru":
            raise Unmappable("a GRU without biases")
        self.made = "gj" if gates else "j"

    def add(self, op, step, what, operands, rule, **more):
        return self.walk.add(op, self.node, operands, rule,
                             suffix=f"{self.k}.{step}{what}", **more)

    def product(self, step, what, x, weight, bias):
        rule = f"bi,{self.made}i" + (f"+{self.made}" if bias else "")
        return self.add("linear", step, what,
                        [x, weight] + ([bias] if bias else []),
                        f"{rule}->b{self.made}")[0]

    def __call__(self, steps, state, keeps):
        """The states h of each step, and the last ones. `keeps`: the last cell
        of an LSTM is read."""
        made, b = [], f"b{self.made}"
        h, c = (*state, None)[:2]
        for i, x in enumerate(steps):
            gates = self.product(i, ".ih", x, self.of_x, self.biases[0])
            recurrent = h and self.product(i, ".hh", h, self.of_h,
                                           self.biases[1])
            if self.cell == "gru":
                gates = self.add("broadcast_add", i, ".biases",
                                 [gates, self.of_gates], "bgj,gj->bgj")[0]
                more = [recurrent, h] if h else []
                h = self.add("gru_gates", i, "", [
                    gates, self.candidate, *more],
                    "bg!j,j" + (",bg!j,bj" if h else "") + "->bj")[0]
                made.append(h)
                continue
            if recurrent:
                gates = self.add("add", i, ".gates", [gates, recurrent],
                                 f"{b},{b}->{b}")[0]
            elif self.biases[1]:  # of a state that is zero
                gates = self.add("broadcast_add", i, ".gates",
                                 [gates, self.biases[1]],
                                 f"{b},{self.made}->{b}")[0]
            if self.cell == "lstm":
                h, c = (*self.add(
                    "lstm_gates", i, "", [gates] + [c] * bool(c),
                    "bg!j" + ",bj" * bool(c) + "->bj" +
                    (",bj" if keeps or i + 1 < len(steps) else "")), None)[:2]
            else:
                h = self.add(self.cell.removeprefix("rnn_"), i, "", [gates],
                             "bj->bj")[0]
            made.append(h)
        return made, ([h, c] if self.cell == "lstm" else [h])

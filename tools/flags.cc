#include "tools/flags.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <vector>

#include "planner/base/amount.h"
#include "planner/base/table.h"
#include "planner/base/whole_number.h"
#include "planner/io/importer.h"

namespace tessera {
namespace {

template <typename Integer>
Result<Integer> ParseInteger(const std::string& text, Integer least,
                             Integer most) {
  const auto value = ParseWhole<Integer>(text);
  if (!value || *value < least || *value > most) {
    const bool bounded = most != std::numeric_limits<Integer>::max();
    return InvalidInput("'" + text + "' is not a whole number " +
                        (bounded ? "from " + std::to_string(least) + " to " +
                                       std::to_string(most)
                                 : "of at least " + std::to_string(least)));
  }
  return *value;
}

Result<double> ParseNumber(const std::string& text, double least,
                           std::string_view expected) {
  double value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || !std::isfinite(value) ||
      value < least) {
    return InvalidInput("'" + text + "' is not " + std::string(expected));
  }
  return value;
}

// The setters of flags that keep a text, or a whole number of at least kLeast.
template <std::string Options::*kMember>
Result<void> SetText(Options& options, const std::string& value) {
  if (value.empty()) return InvalidInput("the value is empty");
  options.*kMember = value;
  return {};
}

template <auto kMember, auto kLeast, auto kMost>
Result<void> SetInteger(Options& options, const std::string& value) {
  TESSERA_TRY(options.*kMember, ParseInteger(value, kLeast, kMost));
  return {};
}

constexpr int64_t kMostInt64 = std::numeric_limits<int64_t>::max();
constexpr uint64_t kMostUint64 = std::numeric_limits<uint64_t>::max();

Result<void> SetStrategy(Options& options, const std::string& value) {
  options.strategy = value;
  return {};
}

Result<void> SetDType(Options& options, const std::string& value) {
  TESSERA_TRY(options.dtype, ParseParameterType(value));
  return {};
}

Result<void> SetOptimizer(Options& options, const std::string& value) {
  TESSERA_RETURN_IF_ERROR(Find("optimizer", Optimizers(), value));
  options.training.optimizer = value;
  return {};
}

Result<void> SetLearningRate(Options& options, const std::string& value) {
  TESSERA_TRY(options.training.learning_rate,
              ParseNumber(value, 0, "a number of at least 0"));
  return {};
}

Result<void> SetTemperature(Options& options, const std::string& value) {
  TESSERA_TRY(options.temperature,
              ParseNumber(value, 1e-9, "a number of at least 1e-9"));
  return {};
}

Result<void> SetLeastLearningRate(Options& options, const std::string& value) {
  TESSERA_TRY(options.min_learning_rate,
              ParseNumber(value, 0, "a number of at least 0"));
  return {};
}

Result<void> SetWeightDecay(Options& options, const std::string& value) {
  TESSERA_TRY(options.training.weight_decay,
              ParseNumber(value, 0, "a number of at least 0"));
  return {};
}

// "B1,B2", or "B1" alone.
Result<void> SetBetas(Options& options, const std::string& value) {
  constexpr std::string_view kExpected =
      "B1,B2, each of at least 0 and below 1 (of momentum B1 alone)";
  const size_t comma = value.find(',');
  const bool both = comma != std::string::npos;
  const auto first = ParseNumber(value.substr(0, comma), 0, kExpected);
  const auto second =
      both ? ParseNumber(value.substr(comma + 1), 0, kExpected) : 0.0;
  if (!first || !second || *first >= 1 || *second >= 1) {
    return InvalidInput("'" + value + "' is not " + std::string(kExpected));
  }
  options.training.beta1 = *first;
  if (both) options.training.beta2 = *second;
  options.betas = both ? 2 : 1;
  return {};
}

// Kernels compute in fp32, where less is 0.
Result<void> SetEpsilon(Options& options, const std::string& value) {
  TESSERA_TRY(options.training.epsilon,
              ParseNumber(value, std::numeric_limits<float>::min(),
                          "a number above 0 that fp32 holds"));
  return {};
}

Result<void> SetClip(Options& options, const std::string& value) {
  TESSERA_TRY(options.training.clip,
              ParseNumber(value, 0, "a number of at least 0"));
  return {};
}

Result<void> SetStochasticRounding(Options& options, const std::string&) {
  options.training.stochastic_rounding = true;
  return {};
}

template <std::vector<std::string> Options::*kMember>
Result<void> AddText(Options& options, const std::string& value) {
  if (value.empty()) return InvalidInput("the value is empty");
  (options.*kMember).push_back(value);
  return {};
}

template <bool Options::*kMember>
Result<void> SetTrue(Options& options, const std::string&) {
  options.*kMember = true;
  return {};
}

// An amount of `kDimension`, positive.
template <double Options::*kMember, Dimension kDimension>
Result<void> SetAmount(Options& options, const std::string& value) {
  TESSERA_TRY(const Amount amount, ParseAmount(value));
  if (amount.dimension != kDimension || !(amount.value > 0)) {
    const bool small = amount.dimension == kDimension;
    return InvalidInput("'" + value + "' is not " +
                        (small ? "above 0: expected " : "") +
                        std::string(Expected(kDimension)));
  }
  options.*kMember = amount.value;
  return {};
}

// Of (0, 1), also "80%".
template <double Options::*kMember>
Result<void> SetShare(Options& options, const std::string& value) {
  TESSERA_TRY(const Amount amount, ParseAmount(value));
  if (amount.dimension != Dimension::kNumber || !(amount.value > 0) ||
      amount.value >= 1) {
    return InvalidInput("'" + value +
                        "' is not a share above 0 and below 1, such as 0.8 or "
                        "80%");
  }
  options.*kMember = amount.value;
  return {};
}

Result<void> SetTokens(Options& options, const std::string& value) {
  TESSERA_TRY(options.tokens, ParseCount(value));
  return {};
}

Result<void> SetDays(Options& options, const std::string& value) {
  TESSERA_TRY(options.days, ParseNumber(value, 1e-6, "a number of days"));
  return {};
}

// Of two names; `what` one of them is, for messages.
struct TwoNames {
  std::string_view what;
  std::array<std::string_view, 2> names;
};
constexpr TwoNames kScalings = {"scaling", {"strong", "weak"}};
constexpr TwoNames kPreferences = {"preference", {"simple", "fastest"}};

template <std::string Options::*kMember, const TwoNames& kNames>
Result<void> SetOneOf(Options& options, const std::string& value) {
  if (std::ranges::find(kNames.names, value) == kNames.names.end()) {
    return UnknownName(kNames.what, value, kNames.names);
  }
  options.*kMember = value;
  return {};
}

constexpr int64_t kCheckedSteps = 3;

Result<void> SetCheck(Options& options, const std::string& value) {
  options.check = kCheckedSteps;
  if (value.empty()) return {};
  return SetInteger<&Options::check, int64_t{1}, kMostInt64>(options, value);
}

Result<void> SetTimeLimit(Options& options, const std::string& value) {
  TESSERA_TRY(options.time_limit_s,
              ParseNumber(value, 0, "a number of seconds"));
  return {};
}

Result<void> SetProposals(Options& options, const std::string& value) {
  TESSERA_TRY(options.proposals, ParseInteger<int64_t>(value, 0, kMostInt64));
  return {};
}

bool IsFlag(std::string_view word) {
  return word.starts_with('-') && word.find_first_of("0123456789.", 1) != 1;
}

// That the optimizer has the means that --betas and --epsilon are of.
Result<void> CheckMoments(const Options& options) {
  const OptimizerRow& optimizer = OptimizerNamed(options.training.optimizer);
  const std::string name(optimizer.name);
  if (options.betas != 0 && options.betas != optimizer.moments) {
    return InvalidInput(optimizer.moments == 0 ? name + " has none"
                        : optimizer.moments == 1
                            ? name + " has one: expected B1 alone"
                            : name + " has two: expected B1,B2",
                        "--betas");
  }
  // Adam's, in whose second moment's root it is.
  if (optimizer.moments < 2 && options.Given("--epsilon")) {
    return InvalidInput(name + " has none", "--epsilon");
  }
  return {};
}

}  // namespace

std::span<const Flag> Flags() {
  static constexpr Flag kTable[] = {
      {"--model", "FILE",
       "model: a Hugging Face config.json or its folder, zoo:NAME ('tessera "
       "list models'), an ONNX file (.onnx), or a graph file",
       SetText<&Options::model>},
      {"--cluster", "NAME[:NODES[xGPUS]][+NAME...][@NETWORK[:N]]|FILE",
       "cluster: a preset ('tessera list topologies'), perhaps with another "
       "network ('tessera list networks'), or nodes of several presets, such "
       "as dgx-h100:2+dgx-a100-80gb:4, or a cluster file (.txtpb, .textproto, "
       ".pbtxt, .json or .pb)",
       SetText<&Options::cluster>},
      {"--stack", "NAME[,KEY=VALUE...]",
       "training software whose habits decide the time of a step ('tessera "
       "list stacks'; default: the cluster's, or Tessera's own runtime)",
       SetText<&Options::stack>},
      {"--collective", "NAME[/PROTOCOL]",
       "how collectives run where they can ('tessera list collectives'; "
       "protocols: ll, ll128, simple; default: the fastest of those that are "
       "not listed as by name only)",
       SetText<&Options::collective>},
      {"--plan", "FILE",
       "plan, as 'tessera search -o' and 'simulate --plan-out' write it",
       SetText<&Options::plan>},
      {"--strategy", "TEXT",
       "uniform plan, such as \"dp=2,tp=8,pp=4,mbs=2,zero=1,sp=1\" (also "
       "zero-group=N|node, bucket=SIZE, prefetch=N, tiles=N, "
       "offload=optimizer:host,parameters:file,gradients:host,activations:host "
       "in any choice of these or none, gradients with the optimizer (file:DIR "
       "says where the files lie), dp-kind=ddp|rooted, ep=N, etp=N, cp=N, "
       "cp-kind=gather|ring|ulysses, "
       "cp-balance=none|zigzag, balance=equal|speed, "
       "branches=split, order=tp-cp-ep-dp-pp (the first the nearest devices), "
       "recompute=none|selective[:LAYERS]|full[:LAYERS]); dp is "
       "what the other degrees leave where absent, mbs 1 (of images and clicks "
       "all that a replica has); vp=N chunks a stage, "
       "schedule=NAME|FILE ('tessera list schedules', or a table of actions)",
       SetStrategy},
      {"--global-batch", "N", "sequences of one step, over all ranks",
       SetInteger<&Options::global_batch, int64_t{1}, int64_t{1} << 31>},
      {"--seq-len", "N", "tokens of a sequence",
       SetInteger<&Options::seq_len, int64_t{1}, int64_t{1} << 31>},
      {"--dtype", "fp64|fp32|bf16|fp16",
       "of parameters and activations (default: the first of bf16 and fp16 in "
       "which each device of the cluster, as it is named, is faster than in "
       "fp32, or else fp32; what --set and --vary change of it does not count)",
       SetDType},
      {"--optimizer", "NAME", "optimizer (default: adamw)", SetOptimizer},
      {"--lr", "X", "learning rate, at its peak (default: 3e-4)",
       SetLearningRate},
      {"--weight-decay", "X",
       "of matrices, not of biases and norms (default: 0.1 of adamw and "
       "adafactor, 0 of others)",
       SetWeightDecay},
      {"--betas", "B1,B2",
       "decay of the means of gradients and of their squares, of adamw and "
       "adam (default: 0.9,0.95); of momentum B1 alone (0.9)",
       SetBetas},
      {"--epsilon", "X",
       "added to the root of the mean square, of adamw and adam (default: "
       "1e-8)",
       SetEpsilon},
      {"--clip", "X", "global gradient norm, 0 for no clipping (default: 1.0)",
       SetClip},
      {"--stochastic-rounding", "",
       "round parameters in bf16 up or down at random from their fp32 masters, "
       "so that in the mean over steps they are these",
       SetStochasticRounding},
      {"--profile", "FILE",
       "times measured by 'tessera profile'; may be given several times, "
       "later files first",
       AddText<&Options::profiles>, true},
      {"--seed", "N",
       "of the search, or of weights, data order and dropout (default: 0)",
       SetInteger<&Options::seed, uint64_t{0}, kMostUint64>},
      {"--json", "", "print one JSON object on standard output",
       SetTrue<&Options::json>},
      {"--time-limit", "SECONDS",
       "time to work (search: 10, without end where --proposals is given; "
       "explain: 10, for alternatives, once the plan itself is priced, or for "
       "the search of --which-strategy, once the textbook's answers are; "
       "whatif: without end, for the plan of each cell; "
       "profile: 60, of measuring, once its ranks have begun)",
       SetTimeLimit},
      {"--proposals", "N",
       "proposals of all chains together; 0: the plans that it starts from "
       "alone",
       SetProposals},
      {"--chains", "N", "chains, whatever the cores (default: 8)",
       SetInteger<&Options::chains, 1, 4096>},
      {"--temperature", "T",
       "of the hottest chains, in units of the best start's step time; the "
       "others of each four have a tenth of the next one's (default: 0.1)",
       SetTemperature},
      {"--threads", "N",
       "threads, of the search or of each rank (default: all cores are "
       "used); neither the plan found under --proposals nor any bit of a "
       "training run depends on them",
       SetInteger<&Options::threads, 1, 1024>},
      {"-o", "FILE",
       "file to write: .txtpb, .json or .pb; of whatif a report, .html",
       SetText<&Options::output>},
      {"--fix", "PATTERN=KEY:VALUE",
       "hold every operator whose name matches to a value, such as "
       "'h.*.attn=tp:8'; keys: dp, tp, cp, ep, zero, recompute. May be given "
       "several times",
       AddText<&Options::fix>, true},
      {"--forbid", "NAME",
       "no such plans: tp, pp, cp, ep, zero1, zero2, zero3, recompute, tiles, "
       "offload, rooted, branches, shares, or a schedule ('tessera list "
       "forbidden'); "
       "may be given several times",
       AddText<&Options::forbid>, true},
      {"--max-microbatch", "N", "samples of a microbatch on a replica, at most",
       SetInteger<&Options::max_microbatch, 1, 1 << 30>},
      {"--space", "megatron|dp|soap|full",
       "which plans are searched ('tessera list spaces'; default: full)",
       SetText<&Options::space>},
      {"--constraints", "FILE",
       "lines 'fix PATTERN=KEY:VALUE', 'forbid NAME', 'max-microbatch N' and "
       "'space NAME'; '#' begins a comment",
       SetText<&Options::constraints>},
      {"--from", "FILE",
       "start from a plan of the same model that was made for another "
       "cluster, global batch, sequence length or dtype",
       SetText<&Options::from>},
      {"--resume", "",
       "start from the plan that the file of -o holds, too, if it is there",
       SetTrue<&Options::resume>},
      {"--confirm", "K",
       "price the best K plans again with the time lost on shared links, as "
       "long as that can change the answer (default: 5; 0: none)",
       SetInteger<&Options::confirm, 0, 1000>},
      {"--verify", "N",
       "run the N plans that are fastest by prediction, and the best baseline, "
       "for a few steps on this host, and take what is fastest here",
       SetInteger<&Options::verify, 1, 100>},
      {"--prefer", "simple|fastest",
       "of plans that differ by less than predictions are off, the simpler "
       "(default), or the fastest all the same",
       SetOneOf<&Options::prefer, kPreferences>},
      {"--which-strategy", "",
       "print the textbook's decision table for the model and cluster beside "
       "what the search finds",
       SetTrue<&Options::which_strategy>},
      {"--as", "NAME",
       "print the plan as settings of another training program and nothing "
       "else ('tessera list trainers')",
       SetText<&Options::trainer>},
      {"--trace", "FILE",
       "write the step, simulated or measured, as a Chrome trace (JSON), for "
       "ui.perfetto.dev",
       SetText<&Options::trace>},
      {"--plan-out", "FILE",
       "write the plan, of a strategy too, for --plan: .txtpb, .json or .pb; "
       "whatif numbers the files where it has many",
       SetText<&Options::plan_output>},
      {"--backend", "cpu|cuda|cuda-loopback",
       "what ranks compute on and talk by ('tessera list backends'; default: "
       "cpu)",
       SetText<&Options::backend>},
      {"--again", "", "measure what the file has, too",
       SetTrue<&Options::again>},
      {"--nproc", "N",
       "ranks, each a process of this host; run and profile have at most 64 "
       "where they are on the CPU (default: run as many as the plan or "
       "--cluster has, discover one for each core, profile on GPUs all "
       "that are there)",
       SetInteger<&Options::nproc, 1, 4096>},
      {"--nodes", "N", "hosts like this one (default: 1)",
       SetInteger<&Options::nodes, 1, 65536>},
      {"--data", "FILE",
       "tokens: .bin of nanoGPT or llm.c, anything else is read as bytes; of "
       "images CIFAR-10's binary format, of clicks MLPerf's of Criteo's "
       "(default there: made up)",
       SetText<&Options::data>},
      {"--steps", "N",
       "optimizer steps, with --load of a checkpoint so many more (default: "
       "20)",
       SetInteger<&Options::steps, int64_t{1}, kMostInt64>},
      {"--until", "N",
       "in place of --steps: up to step N of the training, so that jobs which "
       "go on from one another end there",
       SetInteger<&Options::until, int64_t{1}, kMostInt64>},
      {"--warmup", "N",
       "steps over which the learning rate rises to --lr (default: 0)",
       SetInteger<&Options::warmup, int64_t{0}, kMostInt64>},
      {"--decay", "constant|cosine|linear|step",
       "how the learning rate falls after the warm-up ('tessera list decays'; "
       "default: constant)",
       SetText<&Options::decay>},
      {"--min-lr", "X",
       "where the decay goes to: the learning rate that the step behind its "
       "last one would have, by cosine or linear (default: 0)",
       SetLeastLearningRate},
      {"--decay-steps", "N",
       "step of training at which the decay ends (default: the last of this "
       "run)",
       SetInteger<&Options::decay_steps, int64_t{1}, kMostInt64>},
      {"--validate-every", "N",
       "steps between validations, on the last rows of the data, which are "
       "then not trained on (default: none)",
       SetInteger<&Options::validate_every, int64_t{1}, kMostInt64>},
      {"--validate-batches", "N", "global batches of a validation (default: 4)",
       SetInteger<&Options::validate_batches, int64_t{1}, int64_t{1} << 31>},
      {"--end-of-text", "ID",
       "token that ends a document: documents are kept apart, each with "
       "positions and a mask of its own",
       SetInteger<&Options::end_of_text, int64_t{0}, int64_t{1} << 31>},
      {"--mask-token", "ID",
       "token that stands for masked ones, for models that are trained on "
       "these (default: the last of the vocabulary)",
       SetInteger<&Options::mask_token, int64_t{0}, int64_t{1} << 31>},
      {"--check", "[N]",
       "at the end train the first N steps (default: 3) again, on one rank of "
       "the CPU, and fail where the losses differ by more than 1e-5 (fp32; "
       "1e-9 in fp64, 0.05 in 16 bits)",
       SetCheck},
      {"--graph", "",
       "on GPUs: from the third step on replay what can be captured of a step "
       "as CUDA graphs",
       SetTrue<&Options::graph>},
      {"--deterministic", "",
       "on GPUs: take no algorithm whose sums have any order, so that runs are "
       "equal bit for bit (on the CPU they always are)",
       SetTrue<&Options::deterministic>},
      {"--tune", "FILE",
       "on GPUs: time the algorithms of each matrix product behind the step "
       "that first runs it, take the fastest on all ranks, and leave the "
       "choices in FILE, which a later run begins with",
       SetText<&Options::tune>},
      {"--compare", "",
       "at the end list the tasks by the error of their predicted times",
       SetTrue<&Options::compare>},
      {"--learn", "FILE",
       "--compare, and write the measured times of the tasks as a profile for "
       "--profile: .txtpb, .json or .pb. What FILE has of other tasks on this "
       "machine stays",
       SetText<&Options::learn>},
      {"--log", "FILE", "write a JSON object for each step, one a line",
       SetText<&Options::log>},
      {"--save", "FILE",
       "write a checkpoint behind the last step, or that in which Ctrl-C came",
       SetText<&Options::save>},
      {"--save-every", "N", "write it also every N steps",
       SetInteger<&Options::save_every, int64_t{1}, kMostInt64>},
      {"--keep-checkpoints", "K",
       "keep the last K of them, those before the newest as FILE.step-N "
       "(default: 1, the newest alone)",
       SetInteger<&Options::keep_checkpoints, 1, 1 << 20>},
      {"--export", "DIR",
       "at the end write the weights there as the model's family publishes "
       "them: model.safetensors, in the model's type",
       SetText<&Options::export_folder>},
      {"--export-shard", "SIZE",
       "cut that into files of at most this size and an index (default: 5GB)",
       SetAmount<&Options::export_shard, Dimension::kBytes>},
      {"--offload-dir", "DIR",
       "where what the plan keeps in files lies (default: the strategy's "
       "folder, or the system's for temporary files)",
       SetText<&Options::offload_directory>},
      {"--vary", "PATH=VALUE,VALUE",
       "vary a field, such as 'nodes=4,8,16', 'device.memory=80,141GB', "
       "'fabric.inter.bandwidth=100,200Gb/s', 'device.flops=1x,2x', "
       "'strategy.tp=2,4,8', 'model.layers=24,48' ('tessera list paths'); may "
       "be given several times: every combination is predicted",
       AddText<&Options::vary>, true},
      {"--set", "PATH=VALUE",
       "set a field: model.layers, model.KEY of the config.json or "
       "model.vocab_multiple=128 (pads a vocabulary to a multiple), or a "
       "dimension of an ONNX file by its symbol (lists and null as in JSON); "
       "or one of the cluster, such as device.memory=76GB or "
       "fabric.inter.latency=5us ('tessera list paths'); may be given several "
       "times",
       AddText<&Options::set>, true},
      {"--fail", "PART",
       "take out a part: 'node3.nic0' (any vertex of the cluster), 'node3' or "
       "'device17' (counted from 0), or the link "
       "'node0.gpu1--node0.nvswitch'. The node of a "
       "failed device is drained; may be given several times",
       AddText<&Options::fail>, true},
      {"--slow", "PART=FACTORx",
       "make a device, a node or links slower: 'device17=1.3x', 'node3=1.1x', "
       "'node3.nic0=2x', 'node0.gpu1--node0.nvswitch=2x'; may be "
       "given several times",
       AddText<&Options::slow>, true},
      {"--replan", "",
       "compare the best plan of each cell: of those that a search starts "
       "from, which --strategy or --plan is one of, or with --proposals what "
       "it finds",
       SetTrue<&Options::replan>},
      {"--fast", "",
       "step times of the evaluator: no breakdown, no time lost on shared "
       "links",
       SetTrue<&Options::fast>},
      {"--sensitivity", "",
       "print by how many per cent the step gets shorter for each per cent of "
       "a resource",
       SetTrue<&Options::sensitivity>},
      {"--csv", "", "print a table of comma-separated values",
       SetTrue<&Options::csv>},
      {"--jitter", "SHARE",
       "standard deviation of every device's time, such as 5%: prints the "
       "median and the 95th percentile of the step",
       SetShare<&Options::jitter>},
      {"--samples", "N", "steps that --jitter draws (default: 100)",
       SetInteger<&Options::samples, 1, 100000>},
      {"--tokens", "N", "tokens of a training run, such as 300B or 1.5T",
       SetTokens},
      {"--days", "D", "the longest that the run of --cheapest may take",
       SetDays},
      {"--checkpoint-every", "N",
       "steps between checkpoints (default: the interval that loses least, "
       "Daly 2006)",
       SetInteger<&Options::checkpoint_every, 1, 1 << 30>},
      {"--restart", "TIME",
       "from a failure until the state begins to be read again, where "
       "device.mtbf is known (default: 5min, assumed)",
       SetAmount<&Options::restart_s, Dimension::kTime>},
      {"--scaling-limit", "SHARE",
       "up to how many devices efficiency (tokens a second and device, over "
       "those of the given cluster) stays above this",
       SetShare<&Options::scaling_limit>},
      {"--scaling", "strong|weak",
       "the global batch stays (default), or grows with the nodes",
       SetOneOf<&Options::scaling, kScalings>},
      {"--cheapest", "CLUSTER,CLUSTER",
       "which of these (presets or files) trains --tokens in --days for the "
       "least money",
       SetText<&Options::cheapest>},
      {"--fit", "",
       "does it fit; if not, the smallest changes with which it does",
       SetTrue<&Options::fit>},
      {"--load", "PATH",
       "go on from this checkpoint, or from weights: a safetensors file, an "
       "index of several, or a folder with them, as the model's family "
       "publishes them, or of an ONNX model an ONNX file",
       SetText<&Options::load>},
  };
  return kTable;
}

const Flag& FlagNamed(std::string_view name) {
  const auto flags = Flags();
  const auto found = std::ranges::find(flags, name, &Flag::name);
  TESSERA_CHECK(found != flags.end()) << name;
  return *found;
}

Result<Options> ParseFlags(std::span<const std::string_view> accepted,
                           size_t max_positional,
                           std::span<const std::string> arguments) {
  Options options;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    if (!word.starts_with("-")) {
      if (options.positional.size() == max_positional) {
        return InvalidInput("unexpected word '" + word + "'");
      }
      options.positional.push_back(word);
      continue;
    }
    const size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const auto known = std::ranges::find(accepted, name);
    if (known == accepted.end()) return UnknownName("flag", name, accepted);
    const Flag& flag = FlagNamed(*known);
    if (options.Given(flag.name)) {
      if (!flag.repeatable) return InvalidInput("given twice", name);
    } else {
      options.given.push_back(flag.name);
    }
    std::string value;
    if (equals != std::string::npos) {
      if (flag.value.empty()) return InvalidInput("takes no value", name);
      value = word.substr(equals + 1);
    } else if (flag.value.starts_with("[")) {
      // A flag begins with a letter, and a number below 0 is for `set` to
      // refuse.
      if (i + 1 < arguments.size() && !IsFlag(arguments[i + 1])) {
        value = arguments[++i];
      }
    } else if (!flag.value.empty()) {
      if (i + 1 == arguments.size() || arguments[i + 1].starts_with("--") ||
          std::ranges::find(accepted, arguments[i + 1]) != accepted.end()) {
        return InvalidInput("needs a value, " + std::string(flag.value), name);
      }
      value = arguments[++i];
    }
    if (auto set = flag.set(options, value); !set) return set.error().At(name);
  }
  TrainingOptions& training = options.training;
  const OptimizerRow& optimizer = OptimizerNamed(training.optimizer);
  if (!options.Given("--weight-decay") && !optimizer.decays_by_default) {
    training.weight_decay = 0;
  }
  if (!optimizer.decays && training.weight_decay > 0) {
    return InvalidInput(
        training.optimizer + " has none: adamw is Adam with weight decay",
        "--weight-decay");
  }
  TESSERA_RETURN_IF_ERROR(CheckMoments(options));
  return options;
}

}  // namespace tessera

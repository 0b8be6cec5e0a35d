#include <algorithm>
#include <initializer_list>
#include <iostream>
#include <ranges>

#include "planner/base/table.h"
#include "runtime/launch/launch.h"
#include "tools/flags.h"
#include "tools/inputs.h"
#include "tools/interrupt.h"
#include "tools/text.h"
#include "tools/verb.h"

namespace tessera {
namespace {

constexpr int kBadInput = 2;
constexpr int kDoesNotFit = 3;

#ifdef TESSERA_HAS_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

// One line, whatever the message holds; a rank's launcher prints it.
int Fail(const Error& error) {
  if (!TellLauncher(error)) {
    std::cerr << "tessera: " << error.ToString() << std::endl;
  }
  return ExitCodeOf(error.code);
}

size_t CountWords(std::string_view text) {
  return text.empty() ? 0
                      : 1 + static_cast<size_t>(std::ranges::count(text, ' '));
}

Result<int> RunVerb(const Verb& verb, const std::vector<std::string>& all) {
  const std::span<const std::string> arguments = std::span(all).subspan(1);
  if (std::ranges::find(arguments, "--help") != arguments.end() ||
      std::ranges::find(arguments, "-h") != arguments.end()) {
    std::cout << HelpText(verb);
    return 0;
  }
  auto options = ParseFlags(verb.flags, CountWords(verb.positional), arguments);
  if (!options) return options.error().At(verb.name);
  for (const std::string_view flag : verb.required) {
    if (!options->Given(flag)) {
      return InvalidInput("needs " + std::string(flag) + " " +
                              std::string(FlagNamed(flag).value),
                          std::string(verb.name));
    }
  }
  options->arguments = all;
  TESSERA_RETURN_IF_ERROR(
      CheckPathsDiffer(*options, /*writes_plan=*/verb.name == "search"));
  return verb.run(*options);
}

Result<int> RunWords(const std::vector<std::string>& arguments) {
  if (arguments.empty()) {
    return InvalidInput("needs a verb; 'tessera --help' lists them");
  }
  const std::string& name = arguments[0];
  if (name == "help" && arguments.size() > 1 &&
      !arguments[1].starts_with('-')) {
    TESSERA_TRY(const Verb* verb, Find("verb", Verbs(), arguments[1]));
    if (arguments.size() > 2) {
      return InvalidInput("unexpected word '" + arguments[2] + "'", "help");
    }
    std::cout << HelpText(*verb);
    return 0;
  }
  if (name == "--help" || name == "-h" || name == "help") {
    std::cout << HelpText();
    return 0;
  }
  if (name == "--version") {
    std::cout << "tessera " TESSERA_VERSION
              << (kHasCuda ? ", with CUDA" : ", without CUDA") << "\n";
    return 0;
  }
  TESSERA_TRY(const Verb* verb, Find("verb", Verbs(), name));
  return RunVerb(*verb, arguments);
}

// What a verb takes that plans for a model: what is planned for what, and how
// it is priced.
constexpr std::string_view kPlanned =
    "--model --cluster --collective --global-batch --seq-len --dtype --set "
    "--optimizer --lr --weight-decay --clip --stochastic-rounding "
    "--end-of-text --profile --stack";

// Of texts such as "--model --cluster".
std::vector<std::string_view> Flags(
    std::initializer_list<std::string_view> texts) {
  std::vector<std::string_view> flags;
  for (const std::string_view text : texts) {
    for (const auto word : std::views::split(text, ' ')) {
      flags.emplace_back(word.begin(), word.end());
    }
  }
  return flags;
}

}  // namespace

int ExitCodeOf(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidInput:
    case ErrorCode::kNotFound:
      return kBadInput;
    case ErrorCode::kInfeasible:
      return kDoesNotFit;
    case ErrorCode::kUnavailable:
      return 1;
    case ErrorCode::kInterrupted:
      return kInterruptedExitCode;
  }
  return 1;
}

std::span<const Verb> Verbs() {
  static const std::vector<Verb> kTable = {
      {"search",
       "find the fastest plan for a model on a cluster",
       "Prints the plan in words, its predicted step time, MFU and memory, and "
       "beside it the baselines (data parallelism, ZeRO, the Megatron expert), "
       "all priced by the same code; the result is never worse than the best "
       "of them. The best few are priced again in the detailed simulator; "
       "where "
       "a baseline or a uniform plan is slower by no more than predictions are "
       "off, it is preferred. --fix, --forbid, --max-microbatch, --space and "
       "--constraints narrow the search. A plan or strategy that is given is "
       "one more start. While it searches, -o holds the best plan so far, for "
       "--resume; Ctrl-C ends it with that plan and exit code 130. "
       "Where no plan fits, the one that lacks least is printed, none is "
       "written, and the exit code is 3. docs/search.md explains it.",
       "tessera search --model examples/models/gpt2-xl/config.json --cluster "
       "dgx-a100-80gb:4 --global-batch 512 --seq-len 1024 -o plan.json",
       "",
       Flags({kPlanned,
              "--plan --strategy --time-limit --proposals --chains "
              "--temperature --threads --seed --fix --forbid --max-microbatch "
              "--space --constraints --from --resume --confirm --verify --data "
              "--prefer -o --json"}),
       {"--model", "--cluster"},
       RunSearch},
      {"simulate",
       "predict the training step of a plan",
       "Takes a plan file or a uniform strategy; without either, data "
       "parallelism. --plan-out writes what was simulated as a plan file, for "
       "'tessera run' or to change by hand. The exit code of a plan that "
       "cannot run (it does not fit the memory of a device or host) is 3.",
       "tessera simulate --model examples/models/gpt2-xl/config.json --cluster "
       "dgx-a100-80gb:4 --global-batch 512 --seq-len 1024 --strategy "
       "dp=4,tp=8,mbs=4 --trace timeline.json",
       "",
       Flags({kPlanned, "--plan --strategy --trace -o --plan-out --json"}),
       {"--model", "--cluster"},
       RunSimulate},
      {"run",
       "train with a plan on this host",
       "Starts one process for each rank, or is one of them under torchrun, "
       "mpirun or srun. Without --cluster it is local-cpu:NPROC, this host's "
       "cores shared out among the ranks; without a "
       "plan or strategy, data parallelism. A plan that does not fit ends "
       "before the first step with exit code 3; losses that --check finds "
       "to differ end it with 1. At the end it prints the "
       "predicted step beside the measured one; --trace writes the measured "
       "step of median time, of all ranks. Ctrl-C ends the run after the step; "
       "a "
       "run that is resumed (--load) goes on as if it had not stopped. "
       "docs/training.md explains the flags.",
       "tessera run --model examples/models/gpt2-tiny/config.json "
       "--global-batch 16 --seq-len 128 --nproc 4 --strategy dp=2,tp=2,mbs=4 "
       "--data examples/data/gpl-3.txt --steps 50",
       "",
       Flags({"--model --set --data --nproc --cluster --collective --plan "
              "--strategy --global-batch --seq-len --steps --until --dtype "
              "--optimizer --lr --weight-decay --betas --epsilon --warmup "
              "--decay --min-lr --decay-steps --clip --stochastic-rounding "
              "--seed --end-of-text --mask-token --validate-every "
              "--validate-batches --log --load --save --save-every "
              "--keep-checkpoints --export --export-shard --offload-dir "
              "--backend --threads --profile "
              "--trace --graph --deterministic --tune --check --compare "
              "--learn --json"}),
       {"--model"},
       RunRun},
      {"profile",
       "time this machine's kernels and collectives",
       "Starts all ranks (--cluster local-cpu:N, or --nproc N; on GPUs one for "
       "each), since they share the machine, and times what they run. With a "
       "model it times what its uniform plans need, but for those that cut "
       "sequences by cp (with a plan or strategy, what that needs); without, "
       "a range of sizes. On GPUs --cluster may be "
       "a larger one of the same GPUs: then kernels are those of plans for it. "
       "What matters most is timed first. A file that is there is extended: "
       "what it has is not measured again. It is written every few seconds, "
       "and Ctrl-C keeps what was measured. It is for --profile of the other "
       "verbs.",
       "tessera profile --cluster local-cpu:4 -o local.profile.pb",
       "",
       Flags({"--cluster --backend --nproc --model --plan --strategy "
              "--global-batch --seq-len --dtype --set --optimizer --lr "
              "--weight-decay --clip --stochastic-rounding --end-of-text "
              "--time-limit --again --threads -o --json"}),
       {"-o"},
       RunProfile},
      {"discover",
       "describe this machine's devices and links as a cluster",
       "Asks NVIDIA's driver for GPUs, memory and NVLinks and Linux for the "
       "PCIe tree, NUMA nodes and network cards, and measures how fast the "
       "host's memory is copied (with --offload-dir also its storage). The "
       "speeds of GPUs and links are those of the presets; 'tessera profile' "
       "measures them. Without a GPU, or with --nproc, the cluster is the "
       "ranks on the cores of this host. Under torchrun, mpirun or srun each "
       "host is described, else --nodes "
       "says how many hosts like this one there are. With --cluster it is a "
       "preset that is written, to change by hand.",
       "tessera discover -o cluster.txtpb",
       "",
       Flags({"-o --cluster --nodes --nproc --offload-dir --json"}),
       {},
       RunDiscover},
      {"validate",
       "compare predictions with published measurements",
       "Reads a table of measured training runs (CSV; costmodel/validate; "
       "tests/testdata/published has some), or of measured collectives, "
       "predicts each without any profile, and prints by source how far off "
       "the predictions are and how well they rank alternatives. Rows that "
       "cannot be mapped are refused with the reason; what a row leaves blank "
       "and is assumed stands in --json. --stack replaces figures of the stack "
       "of that name, for all rows that it stands for.",
       "tessera validate runs.csv --json",
       "TABLE.csv",
       Flags({"--stack --threads --json"}),
       {},
       RunValidate},
      {"whatif",
       "predict steps on clusters that are not there",
       "Predicts the plan or strategy on the cluster, and on every combination "
       "of the values of --vary; names what holds each up, and marks what does "
       "not fit. A strategy keeps its degrees, and its dp follows the devices; "
       "--replan compares the best plans instead. -o writes a report (HTML, "
       "readable offline). --scaling-limit, --cheapest and --fit ask questions "
       "of it. Ctrl-C prints what is done, with exit code 130. docs/whatif.md "
       "explains paths, units and formulas.",
       "tessera whatif --model examples/models/gpt2-xl/config.json --cluster "
       "dgx-a100-80gb:4 --global-batch 512 --seq-len 1024 --strategy "
       "tp=2,mbs=4 --vary nodes=1,2,4,8 --vary "
       "fabric.inter.bandwidth=100,200Gb/s -o report.html",
       "",
       Flags({kPlanned,
              "--plan --strategy --replan --vary --fail --slow --fast "
              "--sensitivity --jitter --samples --tokens --days "
              "--checkpoint-every --restart --scaling-limit --scaling "
              "--cheapest --fit --proposals --time-limit --threads --seed "
              "--plan-out -o "
              "--json --csv"}),
       {"--model"},
       RunWhatif},
      {"explain",
       "say why a plan is as it is",
       "Prints what a practitioner calls the plan, its layers, what binds the "
       "step (compute, a class of links, the pipeline's bubble, memory "
       "bandwidth, or the memory capacity that it lacks), and "
       "for each decision what the next best choices would cost, all else "
       "equal, each as soon as it is known. --time-limit limits the pricing of "
       "these choices, after the plan itself is priced, however long that "
       "takes. Without a plan "
       "or strategy it is data parallelism. With "
       "--which-strategy it prints what the textbook advises for the model and "
       "cluster, and what a search finds, which --time-limit then limits; with "
       "--as, the plan for another training program. The exit code is 3 where "
       "the plan does not fit. docs/search.md explains it.",
       "tessera explain --model zoo:gpt2-xl --cluster dgx-a100-80gb:4 "
       "--global-batch 512 --seq-len 1024 --strategy dp=4,tp=8,mbs=4",
       "",
       Flags({kPlanned,
              "--plan --strategy --which-strategy --as --time-limit "
              "--proposals --threads --seed --json"}),
       {"--model", "--cluster"},
       RunExplain},
      {"diff",
       "compare two plans and what they cost",
       "Prints what the plans have otherwise, layer by layer, and their "
       "predicted times and memory side by side.",
       "tessera diff a.json b.json --model zoo:gpt2-xl --cluster "
       "dgx-a100-80gb:4 --global-batch 512 --seq-len 1024",
       "A.json B.json",
       Flags({kPlanned, "--json"}),
       {"--model", "--cluster"},
       RunDiff},
      {"list",
       "print what Tessera knows: operators, topologies, ...",
       "Without KIND it prints the kinds.",
       "tessera list topologies",
       "[KIND]",
       Flags({"--json"}),
       {},
       RunList},
  };
  return kTable;
}

std::string HelpText() {
  std::string out =
      "Tessera plans, simulates and runs the training of a model on a "
      "cluster.\n\nusage: tessera VERB [FLAGS]\n\n";
  for (const Verb& verb : Verbs()) {
    out += "  " + std::string(verb.name) +
           std::string(10 - verb.name.size(), ' ') + std::string(verb.summary) +
           "\n";
  }
  const Verb& first = Verbs().front();
  out += "\nExit codes:\n\n  " +
         Wrap(
             "0 done; 1 a failure on the way; 2 bad input, also constraints "
             "that leave no plan; 3 the plan, or any "
             "that was found, does not fit the cluster's memory, which "
             "'simulate' and 'search' say after printing it, or 'whatif' has "
             "no answer; 130 interrupted.",
             2) +
         "\n";
  return out +
         "\n'tessera VERB --help' and 'tessera help VERB' explain a verb, "
         "'tessera\n--version' says which program this is. For "
         "example:\n\n  " +
         Wrap(first.example, 4) + "\n";
}

std::string HelpText(const Verb& verb) {
  std::string out = "tessera " + std::string(verb.name) + ": " +
                    std::string(verb.summary) + "\n\nusage: tessera " +
                    std::string(verb.name);
  for (const std::string_view flag : verb.required) {
    out += " " + std::string(flag) + " " + std::string(FlagNamed(flag).value);
  }
  if (!verb.positional.empty()) {
    out += " " + std::string(verb.positional);
  }
  out += " [FLAGS]\n\n" + Wrap(verb.details, 0) + "\n\n";
  constexpr size_t kIndent = 6;
  for (const std::string_view name : verb.flags) {
    const Flag& flag = FlagNamed(name);
    out += "  " + std::string(flag.name);
    if (!flag.value.empty()) out += " " + std::string(flag.value);
    out += "\n" + std::string(kIndent, ' ') + Wrap(flag.help, kIndent) + "\n";
  }
  return out + "\nFor example:\n\n  " + Wrap(verb.example, 4) + "\n";
}

int RunTessera(const std::vector<std::string>& arguments) {
  const auto code = RunWords(arguments);
  if (!code) return Fail(code.error());
  std::cout.flush();
  if (OutputIsUnread()) return kInterruptedExitCode;
  if (!std::cout) {
    return Fail({ErrorCode::kUnavailable, "cannot write", "standard output"});
  }
  return *code;
}

}  // namespace tessera

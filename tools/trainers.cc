#include "tools/trainers.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "planner/base/append.h"
#include "planner/base/table.h"
#include "planner/ir/statistics_dtype.h"
#include "planner/plan/strategy_text.h"
#include "planner/plan/used_part.h"
#include "tools/text.h"

namespace tessera {
namespace {

constexpr const char* kWhere = "--as";

// Replicas of all but experts.
int ReplicasOf(const Strategy& s) {
  return s.dp * s.ep;
}

// The dimensions of more than one rank, innermost first.
std::vector<MeshDimension> OrderOf(const Strategy& s) {
  std::vector<MeshDimension> order = s.order;
  std::erase_if(order,
                [&](MeshDimension d) { return s.*RowOf(d).degree == 1; });
  return order;
}

// Notes on what neither program has.
void NoteWhatNoneHas(const UniformPlan& uniform,
                     std::vector<std::string>& notes) {
  const Strategy& s = uniform.strategy;
  if (uniform.index.graph->dtype == DType::kFloat64) {
    notes.push_back("dtype fp64: they train in fp32");
  }
  if (uniform.training.optimizer != TrainingOptions().optimizer) {
    notes.push_back("optimizer=" + uniform.training.optimizer +
                    ": optimizers are not among these settings");
  }
  if (uniform.training.stochastic_rounding) {
    notes.push_back("stochastic rounding: masters are rounded to the nearest");
  }
  if (s.dp_kind == DataParallelKind::kRooted) {
    notes.push_back(
        "dp-kind=rooted: every rank reduces and steps, as with ddp");
  }
  if (s.split_branches) {
    notes.push_back("branches=split: branches run one after another");
  }
  if (s.by_speed) {
    notes.push_back(
        "balance=speed: every replica gets as many samples, so that the "
        "slowest devices decide");
  }
  if (s.prefetch != Strategy().prefetch) {
    notes.push_back("prefetch=" + std::to_string(s.prefetch) +
                    ": it is theirs how far ahead they gather");
  }
  if (s.tiles > 1) {
    notes.push_back("tiles=" + std::to_string(s.tiles) + ": layers run whole");
  }
}

// Arguments of Megatron-LM, one by one.
class MegatronArguments {
 public:
  void Add(std::string_view flag) { Append({std::string(flag)}); }
  void Add(std::string_view flag, std::string value) {
    Append({std::string(flag), std::move(value)});
  }
  void Add(std::string_view flag, int64_t value) {
    Add(flag, std::to_string(value));
  }
  const Json& json() const { return json_; }
  const std::string& text() const { return text_; }

 private:
  void Append(const std::vector<std::string>& words) {
    std::string line;
    for (const std::string& word : words) {
      json_.Append(word);
      AppendTo(line, " ", ShellWord(word));
    }
    AppendTo(text_, " \\\n", line);
  }

  Json json_ = Json::Array();
  std::string text_;
};

// How many layers each position of the pipeline has.
std::vector<int> LayersByPosition(const UniformPlan& uniform) {
  const auto& nodes = uniform.index.nodes_of_block;
  std::vector<int> layers(
      static_cast<size_t>(uniform.strategy.pp * uniform.strategy.vp));
  const auto [first, last] = Layers(uniform.index);
  for (int block = first; block < last; ++block) {
    const OpPlacement& op =
        uniform.plan.ops[nodes[static_cast<size_t>(block)][0].index()];
    ++layers[static_cast<size_t>(op.chunk * uniform.strategy.pp) +
             op.group.index()];
  }
  return layers;
}

// "Et*7|t*8|t*7L": the embedding, so many layers of each position, the loss
// (megatron/core/transformer/pipeline_parallel_layer_layout.py).
std::string LayoutText(const std::vector<int>& layers) {
  std::string text = "E";
  for (size_t p = 0; p < layers.size(); ++p) {
    if (p > 0) text += "|";
    if (layers[p] > 0) text += "t*" + std::to_string(layers[p]);
  }
  return text + "L";
}

void AddPipeline(const UniformPlan& uniform, MegatronArguments& arguments,
                 std::vector<std::string>& notes) {
  const Strategy& s = uniform.strategy;
  if (s.pp == 1) return;
  arguments.Add("--pipeline-model-parallel-size", s.pp);
  const std::vector<int> layers = LayersByPosition(uniform);
  if (std::ranges::count(layers, layers[0]) < std::ssize(layers)) {
    arguments.Add("--pipeline-model-parallel-layout", LayoutText(layers));
  } else if (s.vp > 1) {
    arguments.Add("--num-virtual-stages-per-pipeline-rank", s.vp);
  }
  if (s.vp > 1 && uniform.plan.microbatches % s.pp != 0) {
    notes.push_back("vp=" + std::to_string(s.vp) +
                    ": Megatron-LM interleaves "
                    "microbatches that pp divides; these are " +
                    std::to_string(uniform.plan.microbatches));
  }
  const std::string_view own = s.vp > 1 ? "interleaved" : "1f1b";
  if (s.schedule != own) {
    notes.push_back("schedule=" + s.schedule + ": Megatron-LM's is " +
                    std::string(own));
  }
}

// Ranks that split the sequence.
void AddContext(const Strategy& s, MegatronArguments& arguments,
                std::vector<std::string>& notes) {
  if (s.cp == 1) return;
  arguments.Add("--context-parallel-size", s.cp);
  arguments.Add("--cp-comm-type", s.cp_kind == "ring"      ? "p2p"
                                  : s.cp_kind == "ulysses" ? "a2a"
                                                           : "all_gather");
  if (!s.zigzag) {
    notes.push_back(
        "cp-balance=none: Megatron-LM gives every rank an early and a late "
        "part of the sequence, as cp-balance=zigzag");
  }
}

void AddExperts(const UniformPlan& uniform, MegatronArguments& arguments,
                std::vector<std::string>& notes) {
  const Strategy& s = uniform.strategy;
  if (!uniform.index.has_experts) return;
  const int inside = s.etp > 0 ? s.etp : s.tp;
  arguments.Add("--expert-model-parallel-size", s.ep * s.tp / inside);
  arguments.Add("--expert-tensor-parallel-size", inside);
  if (s.tp > 1 && !s.sp) {
    notes.push_back(
        "sp=0: Megatron-LM trains experts with tensor parallelism only with "
        "--sequence-parallel");
  }
}

void AddZero(const UniformPlan& uniform, MegatronArguments& arguments,
             std::vector<std::string>& notes) {
  const Strategy& s = uniform.strategy;
  const int replicas = ReplicasOf(s) * s.cp;
  const bool offloads = s.optimizer_tier != MemoryTier::kDevice;
  if (offloads && s.zero == 0) {
    arguments.Add("--use-distributed-optimizer");
    if (replicas > 1) {
      notes.push_back(
          "zero=0: Megatron-LM offloads optimizers that ZeRO-1 has cut");
    }
  }
  if (replicas == 1) return;
  arguments.Add("--overlap-grad-reduce");
  if (s.bucket.value > 0) {
    arguments.Add("--ddp-bucket-size",
                  s.bucket.value / SizeOf(uniform.gradients));
  }
  if (s.zero >= 1) {
    arguments.Add("--use-distributed-optimizer");
    arguments.Add("--overlap-param-gather");
  }
  if (s.zero >= 2) {
    arguments.Add("--use-megatron-fsdp");
    arguments.Add("--data-parallel-sharding-strategy",
                  s.zero == 2 ? "optim_grads" : "optim_grads_params");
    arguments.Add("--ckpt-format", "fsdp_dtensor");
    notes.push_back(
        "Megatron-FSDP takes no CUDA_DEVICE_MAX_CONNECTIONS=1 in the "
        "environment");
  }
  if (s.zero_group > 0 && s.zero_group < replicas) {
    const int instances = replicas / s.zero_group;
    arguments.Add("--num-distributed-optimizer-instances", instances);
    if (uniform.index.has_experts && s.dp * s.cp % instances != 0) {
      notes.push_back(
          "zero-group=" + std::to_string(s.zero_group) +
          ": Megatron-LM's instances must divide the copies of an expert, " +
          std::to_string(s.dp * s.cp));
    }
  }
}

void AddRecompute(const Strategy& s, MegatronArguments& arguments,
                  std::vector<std::string>& notes) {
  switch (s.recompute) {
    case RecomputeLevel::kNone:
      return;
    case RecomputeLevel::kSelective:
      arguments.Add("--recompute-granularity", "selective");
      break;
    case RecomputeLevel::kFull:
      arguments.Add("--recompute-granularity", "full");
      if (s.recompute_layers > 0 && s.pp == 1) {
        arguments.Add("--recompute-method", "block");
        arguments.Add("--recompute-num-layers", s.recompute_layers);
        return;
      }
      arguments.Add("--recompute-method", "uniform");
      arguments.Add("--recompute-num-layers", 1);
      break;
  }
  if (s.recompute_layers > 0) {
    notes.push_back("recompute=" + RecomputeText(s) +
                    ": Megatron-LM recomputes as many layers on every stage; "
                    "by these arguments all");
  }
}

void AddOffload(const Strategy& s, MegatronArguments& arguments,
                std::vector<std::string>& notes) {
  if (s.optimizer_tier != MemoryTier::kDevice) {
    arguments.Add("--optimizer-cpu-offload");
    arguments.Add("--use-precision-aware-optimizer");
  }
  const auto lacks = [&](std::string_view what) {
    notes.push_back("offload=" + std::string(what) +
                    ": these settings have none of it");
  };
  if (s.optimizer_tier == MemoryTier::kFile) {
    notes.push_back(
        "offload=optimizer:file: to the host's memory, there are no files");
  }
  if (s.parameter_tier != MemoryTier::kDevice) lacks("parameters");
  if (s.gradient_tier != MemoryTier::kDevice) lacks("gradients");
  if (s.activation_tier != MemoryTier::kDevice) lacks("activations");
}

// Ranks on the fabric: the order of megatron/training/initialize.py, in which
// dimensions of one rank have no place.
void AddOrder(const Strategy& s, MegatronArguments& arguments,
              std::vector<std::string>& notes) {
  using enum MeshDimension;
  const auto is = [&](const std::vector<MeshDimension>& order) {
    Strategy other = s;
    other.order = order;
    return OrderOf(other) == OrderOf(s);
  };
  if (is({kTensor, kContext, kExpert, kData, kPipeline})) return;
  if (is({kTensor, kContext, kExpert, kPipeline, kData})) {
    arguments.Add("--use-tp-pp-dp-mapping");
    return;
  }
  std::string names;
  for (const MeshDimension d : OrderOf(s)) {
    AppendTo(names, "-", RowOf(d).name);
  }
  notes.push_back("order=" + names + ": Megatron-LM's ranks are in the order " +
                  "tp-cp-ep-dp-pp");
}

// Whether each of its layers attends to what is before, and to nothing else.
bool IsDecoder(const GraphIndex& index) {
  const auto first = index.graph->nodes.begin();
  return index.has_attention &&
         std::all_of(first, first + index.forward_nodes, [](const Node& node) {
           return node.op->op_class != OpClass::kAttention ||
                  node.op->name == "attention" ||
                  node.op->name == "attention_alibi";
         });
}

Result<TrainerSettings> MegatronSettings(const UniformPlan& uniform) {
  const Strategy& s = uniform.strategy;
  const Graph& graph = *uniform.index.graph;
  if (!IsDecoder(uniform.index)) {
    return InvalidInput("pretrain_gpt.py trains decoders of text, which " +
                            graph.name + " is not",
                        kWhere);
  }
  TrainerSettings settings;
  MegatronArguments arguments;
  arguments.Add("--tensor-model-parallel-size", s.tp);
  if (s.sp) arguments.Add("--sequence-parallel");
  AddPipeline(uniform, arguments, settings.notes);
  AddContext(s, arguments, settings.notes);
  AddExperts(uniform, arguments, settings.notes);
  arguments.Add("--micro-batch-size", s.mbs);
  arguments.Add("--global-batch-size", graph.global_batch);
  arguments.Add("--seq-length", graph.seq_len);
  if (graph.dtype == DType::kBFloat16) arguments.Add("--bf16");
  if (graph.dtype == DType::kFloat16) arguments.Add("--fp16");
  arguments.Add("--clip-grad", Json(uniform.training.clip).ToString());
  AddZero(uniform, arguments, settings.notes);
  AddRecompute(s, arguments, settings.notes);
  AddOffload(s, arguments, settings.notes);
  AddOrder(s, arguments, settings.notes);
  if ((s.tp > 1 || s.cp > 1) && s.zero < 2) {
    settings.notes.push_back(
        "with tensor or context parallelism Megatron-LM wants "
        "CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment, before Blackwell");
  }
  NoteWhatNoneHas(uniform, settings.notes);
  settings.settings = arguments.json();
  settings.text = arguments.text();
  return settings;
}

// "cpu" or "nvme", as DeepSpeed calls them.
Json OffloadJson(MemoryTier tier, const std::string& directory,
                 std::vector<std::string>& notes) {
  if (tier == MemoryTier::kHost) {
    return Json::Object({{"device", "cpu"}, {"pin_memory", true}});
  }
  if (directory.empty()) {
    notes.push_back("nvme_path is to be the folder of the host's own drive");
  }
  return Json::Object(
      {{"device", "nvme"},
       {"nvme_path", directory.empty() ? "/local_nvme" : directory},
       {"pin_memory", true}});
}

Json ZeroJson(const UniformPlan& uniform, std::vector<std::string>& notes) {
  const Strategy& s = uniform.strategy;
  Json zero = Json::Object({{"stage", s.zero}});
  if (s.zero == 0) return zero;
  zero.Set("overlap_comm", true);
  if (s.bucket.value > 0) {
    zero.Set("reduce_bucket_size", s.bucket.value / SizeOf(uniform.gradients));
  }
  if (s.zero_group > 0 && s.zero_group < s.dp) {
    if (s.zero == 3) {
      zero.Set("mics_shard_size", s.zero_group);
      notes.push_back(
          "mics_shard_size: the model is to be made within "
          "deepspeed.zero.MiCS_Init");
    } else {
      notes.push_back("zero-group=" + std::to_string(s.zero_group) +
                      ": DeepSpeed cuts ZeRO-" + std::to_string(s.zero) +
                      " over all ranks");
    }
  }
  if (s.optimizer_tier != MemoryTier::kDevice) {
    MemoryTier tier = s.optimizer_tier;
    if (tier == MemoryTier::kFile && s.zero < 3) {
      tier = MemoryTier::kHost;
      notes.push_back(
          "offload=optimizer:file: DeepSpeed has files with ZeRO-3 alone; here "
          "it is the host's memory");
    }
    zero.Set("offload_optimizer",
             OffloadJson(tier, s.offload_directory, notes));
  }
  if (s.gradient_tier != MemoryTier::kDevice && s.zero < 2) {
    notes.push_back(
        "offload=gradients: DeepSpeed offloads them from ZeRO-2 on");
  }
  if (s.parameter_tier != MemoryTier::kDevice) {
    if (s.zero == 3) {
      zero.Set("offload_param",
               OffloadJson(s.parameter_tier, s.offload_directory, notes));
    } else {
      notes.push_back(
          "offload=parameters: DeepSpeed offloads parameters of ZeRO-3 alone");
    }
  }
  return zero;
}

Result<TrainerSettings> DeepSpeedSettings(const UniformPlan& uniform) {
  const Strategy& s = uniform.strategy;
  const Graph& graph = *uniform.index.graph;
  for (const DimensionRow& row : kDimensions) {
    if (row.dimension == MeshDimension::kData || s.*row.degree == 1 ||
        row.dimension == MeshDimension::kTensor) {
      continue;
    }
    return InvalidInput("the plan has " + std::string(row.name) + "=" +
                            std::to_string(s.*row.degree) +
                            ", which is no setting of DeepSpeed's file, but "
                            "code of the model",
                        kWhere);
  }
  if (s.tp > 1 && s.zero == 3) {
    return InvalidInput(
        "the plan has tp=" + std::to_string(s.tp) +
            " and zero=3: DeepSpeed has tensor parallelism with ZeRO of stage "
            "2 at most",
        kWhere);
  }
  TrainerSettings settings;
  std::vector<std::string>& notes = settings.notes;
  Json file =
      Json::Object({{"train_batch_size", graph.global_batch},
                    {"train_micro_batch_size_per_gpu", s.mbs},
                    {"gradient_accumulation_steps", uniform.plan.microbatches},
                    {"gradient_clipping", uniform.training.clip}});
  if (graph.dtype == DType::kBFloat16) {
    file.Set("bf16", Json::Object({{"enabled", true}}));
  }
  if (graph.dtype == DType::kFloat16) {
    file.Set("fp16", Json::Object({{"enabled", true}}));
  }
  file.Set("zero_optimization", ZeroJson(uniform, notes));
  if (s.tp > 1) {
    file.Set("tensor_parallel", Json::Object({{"autotp_size", s.tp}}));
    if (s.sp) notes.push_back("sp=1: AutoTP repeats norms and dropout");
    if (s.dp > 1 && OrderOf(s).front() != MeshDimension::kTensor) {
      notes.push_back("order: AutoTP's ranks are neighbours");
    }
  }
  if (s.recompute != RecomputeLevel::kNone) {
    notes.push_back("recompute=" + RecomputeText(s) +
                    ": checkpoints are set in the model's code, in "
                    "transformers by gradient_checkpointing_enable()");
  }
  if (s.activation_tier != MemoryTier::kDevice) {
    notes.push_back(
        "offload=activations: DeepSpeed moves what its own checkpointing "
        "keeps, which is called in the model's code");
  }
  if (s.zero == 0 && (s.optimizer_tier != MemoryTier::kDevice ||
                      s.parameter_tier != MemoryTier::kDevice)) {
    notes.push_back("offload: DeepSpeed offloads with ZeRO alone");
  }
  NoteWhatNoneHas(uniform, notes);
  settings.text = file.ToString();
  settings.settings = std::move(file);
  return settings;
}

constexpr std::array kTrainers = {
    Trainer{"megatron-lm", "arguments of Megatron-LM's pretrain_gpt.py",
            MegatronSettings},
    Trainer{"deepspeed", "the JSON file that DeepSpeed takes",
            DeepSpeedSettings},
};

}  // namespace

std::span<const Trainer> Trainers() {
  return kTrainers;
}

Result<TrainerSettings> SettingsOf(std::string_view trainer,
                                   const GraphIndex& index,
                                   const Cluster& cluster, const Plan& plan,
                                   const TrainingOptions& training) {
  TESSERA_TRY(const Trainer* row, Find("trainer", Trainers(), trainer));
  auto uniform = StrategyOnPart(index, cluster, plan);
  if (!uniform) {
    return InvalidInput("the plan is " + StrategyText(index, cluster, plan) +
                            ": expected a uniform one, as 'tessera search "
                            "--space megatron' finds",
                        kWhere);
  }
  TESSERA_TRY(
      TrainerSettings settings,
      row->settings({index, plan, *std::move(uniform),
                     GradientDType(index.graph->dtype, cluster.stack.memory),
                     training}));
  // Two tiers may want the same.
  std::vector<std::string>& notes = settings.notes;
  for (auto note = notes.begin(); note != notes.end();) {
    note = std::find(notes.begin(), note, *note) == note ? note + 1
                                                         : notes.erase(note);
  }
  return settings;
}

}  // namespace tessera

#pragma once
// Tiny models and runs of them, for tests of the training runtime.

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "planner/base/element_count.h"
#include "planner/base/rng.h"
#include "planner/io/importer.h"
#include "planner/lower/lower.h"
#include "planner/plan/strategy.h"
#include "planner/topology/topologies.h"
#include "runtime/comm/loopback_world.h"
#include "runtime/comm/thread_world.h"
#include "runtime/data/batches.h"
#include "runtime/data/tokens.h"
#include "runtime/device/cpu_device.h"
#include "runtime/safetensors.h"
#include "runtime/train_state.h"
#include "runtime/trainer.h"
#include "tests/support/queue_cpu_device.h"
#include "tests/support/temp_path.h"

namespace tessera {

// Writes `text` as a config.json of its own and imports it, with gradients.
inline Graph ImportTiny(const std::string& text, int64_t batch, int64_t seq_len,
                        DType dtype = DType::kFloat64) {
  const std::string folder = TempPath("model");
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json") << text;
  ImportOptions options;
  options.global_batch = batch;
  options.seq_len = seq_len;
  options.dtype = dtype;
  auto forward = ImportModel(folder, options);
  std::filesystem::remove_all(folder);
  auto graph = Differentiate(std::move(forward).value());
  return std::move(graph).value();
}

inline constexpr int64_t kTinyVocabulary = 40;

// Tied embeddings, biases, dropout.
inline std::string TinyGpt2(int layers, int heads = 8, int hidden = 16) {
  return R"({"model_type": "gpt2", "n_embd": )" + std::to_string(hidden) +
         R"(, "n_layer": )" + std::to_string(layers) + R"(, "n_head": )" +
         std::to_string(heads) +
         R"(, "vocab_size": 40, "n_positions": 8, "initializer_range": 0.2,
              "embd_pdrop": 0.1, "resid_pdrop": 0.1, "attn_pdrop": 0.0,
              "activation_function": "gelu_new",
              "layer_norm_epsilon": 1e-5})";
}

// Four query heads on two key/value heads, rotary positions, no biases.
inline std::string TinyLlama(int layers) {
  return R"({"model_type": "llama", "hidden_size": 16,
             "num_hidden_layers": )" +
         std::to_string(layers) +
         R"(, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 24, "vocab_size": 40,
              "max_position_embeddings": 8, "rms_norm_eps": 1e-6,
              "rope_theta": 10000.0, "hidden_act": "silu",
              "initializer_range": 0.2, "tie_word_embeddings": false})";
}

// Four experts of which a token takes two, some choices dropped.
inline std::string TinyMixtral(int layers) {
  return R"({"model_type": "mixtral", "hidden_size": 16,
             "num_hidden_layers": )" +
         std::to_string(layers) +
         R"(, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 12, "vocab_size": 40,
              "max_position_embeddings": 8, "rms_norm_eps": 1e-6,
              "rope_theta": 10000.0, "hidden_act": "silu",
              "initializer_range": 0.2, "tie_word_embeddings": false,
              "num_local_experts": 4, "num_experts_per_tok": 2,
              "expert_capacity_factor": 1.0, "router_aux_loss_coef": 0.1})";
}

// Latent attention and, behind a first dense layer, four groups of two experts,
// of which each token chooses among two, beside a shared one.
inline std::string TinyDeepseek(int layers) {
  return R"({"model_type": "deepseek_v3", "hidden_size": 16,
             "num_hidden_layers": )" +
         std::to_string(layers) +
         R"(, "num_attention_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 5,
              "qk_rope_head_dim": 4, "qk_nope_head_dim": 3, "v_head_dim": 2,
              "intermediate_size": 24, "moe_intermediate_size": 12,
              "vocab_size": 40, "max_position_embeddings": 8,
              "rms_norm_eps": 1e-6, "rope_theta": 100.0,
              "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 1,
                               "beta_slow": 0.1, "mscale": 0.5,
                               "mscale_all_dim": 1,
                               "original_max_position_embeddings": 4},
              "hidden_act": "silu", "initializer_range": 0.2,
              "tie_word_embeddings": false, "first_k_dense_replace": 1,
              "n_routed_experts": 8, "n_shared_experts": 1,
              "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
              "routed_scaling_factor": 2.5, "expert_capacity_factor": 1.5,
              "aux_loss_alpha": 0.1})";
}

// Qwen2 with experts beside a weighed MLP, or Qwen3 with norms of heads.
inline std::string TinyQwen(int layers, bool experts) {
  const std::string family =
      experts ? R"("qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 8, "qkv_bias": true,
                   "shared_expert_intermediate_size": 12,
                   "expert_capacity_factor": 1.5)"
              : R"("qwen3", "head_dim": 6)";
  return R"({"hidden_size": 16, "num_hidden_layers": )" +
         std::to_string(layers) +
         R"(, "num_attention_heads": 4, "num_key_value_heads": 2,
              "intermediate_size": 12, "vocab_size": 40,
              "max_position_embeddings": 8, "rms_norm_eps": 1e-6,
              "rope_theta": 10000.0, "hidden_act": "silu",
              "initializer_range": 0.2, "tie_word_embeddings": false,
              "model_type": )" +
         family + "}";
}

// Images of 8 x 8 in four patches, behind a class token. Without biases of
// queries and keys: a softmax does not see those of keys, whose gradients are
// nothing but rounding.
inline std::string TinyVit(int layers) {
  return R"({"model_type": "vit", "image_size": 8, "patch_size": 4,
             "num_labels": 6, "hidden_size": 16, "num_attention_heads": 4,
             "intermediate_size": 24, "initializer_range": 0.2,
             "hidden_dropout_prob": 0.1, "qkv_bias": false,
             "num_hidden_layers": )" +
         std::to_string(layers) + "}";
}

// Images of 16 x 16, which a stem makes 4 x 4, and residual layers in two
// stages, the second of which halves them again.
inline std::string TinyResNet(const std::string& layer_type = "bottleneck",
                              int layers = 1) {
  const std::string depth = std::to_string(layers);
  return R"({"model_type": "resnet", "image_size": 16, "num_channels": 3,
             "num_labels": 6, "embedding_size": 4, "hidden_sizes": [16, 24],
             "depths": [)" +
         depth + ", " + depth + R"(], "layer_type": ")" + layer_type + R"("})";
}

// Gemma, Phi-3, OPT or BLOOM: a gated MLP with GELU and a tied head, a window,
// ReLU and a table of positions, ALiBi.
inline std::string TinyOf(const std::string& family, int layers) {
  const std::string sizes = R"("hidden_size": 16, "num_hidden_layers": )" +
                            std::to_string(layers) +
                            R"(, "num_attention_heads": 4, "vocab_size": 40,
           "initializer_range": 0.2, "max_position_embeddings": 8, )";
  const std::string more =
      family == "gemma"
          ? R"("intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 6,
               "hidden_activation": "gelu_pytorch_tanh")"
      : family == "phi3" ? R"("intermediate_size": 24, "num_key_value_heads": 2,
               "sliding_window": 5)"
      : family == "opt"
          ? R"("ffn_dim": 24, "init_std": 0.2)"
          : R"("n_head": 4, "n_layer": )" + std::to_string(layers);
  return "{" + sizes + more + R"(, "model_type": ")" + family + "\"}";
}

// Bidirectional attention, and the losses of masked tokens and of the next
// sentence.
inline std::string TinyBert(int layers) {
  return R"({"model_type": "bert", "hidden_size": 16,
             "num_hidden_layers": )" +
         std::to_string(layers) +
         R"(, "num_attention_heads": 4, "intermediate_size": 24,
              "vocab_size": 40, "max_position_embeddings": 8,
              "hidden_dropout_prob": 0.1, "initializer_range": 0.2})";
}

// As many layers of the encoder and of the decoder; sources are longer by one.
inline std::string TinyT5(int layers, bool gated = false) {
  return R"({"model_type": "t5", "d_model": 16, "d_kv": 5, "d_ff": 24,
             "num_heads": 4, "num_layers": )" +
         std::to_string(layers) +
         R"(, "vocab_size": 40, "relative_attention_num_buckets": 8,
              "relative_attention_max_distance": 6, "source_len": 9,
              "is_encoder_decoder": true, "feed_forward_proj": )" +
         (gated ? R"("gated-gelu", "tie_word_embeddings": false})"
                : R"("relu"})");
}

// A file of 1000 tokens in nanoGPT's format: Mix64(i) mod the vocabulary.
inline TokenData TinyTokens() {
  const std::string path = TempPath("tokens.bin");
  {
    std::ofstream file(path, std::ios::binary);
    for (uint64_t i = 0; i < 1000; ++i) {
      const auto token = static_cast<uint16_t>(
          Mix64(i) % static_cast<uint64_t>(kTinyVocabulary));
      file.write(reinterpret_cast<const char*>(&token), sizeof(token));
    }
  }
  auto data = OpenTokens(path, kTinyVocabulary);
  std::filesystem::remove(path);
  return std::move(data).value();
}

// Rows at random places of `data`, which outlives the result, those that the
// reference of tests/testdata/reference draws: "tokens", as "labels" the token
// behind each, and "positions" from 0.
inline LoadInput LoadAtRandom(const TokenData& data, uint64_t seed,
                              const Graph& graph) {
  const int64_t places = data.size() - graph.seq_len;
  const int64_t batch = graph.global_batch;
  return [&data, seed, places, batch](const Tensor& tensor,
                                      const LocalTensor& block,
                                      int64_t first_sample) -> Result<void> {
    const auto step = static_cast<uint64_t>(first_sample / batch);
    const uint64_t key = Mix64(Mix64(seed) ^ step);
    int32_t* out = block.as<int32_t>();
    for (int64_t row = 0; row < block.shape[0]; ++row) {
      const auto sample = static_cast<uint64_t>(block.offset[0] + row);
      const auto start = static_cast<int64_t>(CounterUniform01(key, sample) *
                                              static_cast<double>(places));
      for (int64_t i = 0; i < block.shape[1]; ++i, ++out) {
        const int64_t place = block.offset[1] + i;
        if (tensor.name == "positions") {
          *out = static_cast<int32_t>(place);
        } else if (tensor.name == "tokens" || tensor.name == "labels") {
          const int64_t label = tensor.name == "labels" ? 1 : 0;
          TESSERA_TRY(*out, data.Token(start + place + label));
        } else {
          return InvalidInput("no data for it", tensor.name);
        }
      }
    }
    return {};
  };
}

inline Result<TaskGraph> LowerStrategy(const Graph& graph, int ranks,
                                       const std::string& strategy,
                                       const TrainingOptions& options) {
  TESSERA_TRY(const Cluster cluster,
              MakeCluster("local-cpu:" + std::to_string(ranks)));
  TESSERA_TRY(const Strategy parsed, ParseStrategy(strategy));
  TESSERA_TRY(const Plan plan, PlanFromStrategy(graph, cluster, parsed));
  return Lower(graph, cluster, plan, options);
}

struct TinyRun {
  int64_t steps = 20;
  uint64_t seed = 7;
  TrainingOptions options = {};
  std::string load_path = {};
  std::string save_path = {};
  int64_t save_every = 0;
  int keep_checkpoints = 1;
  std::string family = {};
  std::string export_folder = {};
  Bytes export_file_bytes = WeightFiles().file_bytes;
  const std::atomic<bool>* stop = nullptr;
  std::function<Result<void>(const StepReport&)> progress = {};
  const Batches* batches = nullptr;  // where null: LoadAtRandom
  std::optional<LearningRate> learning_rate = {};
  int64_t validate_every = 0;
  bool in_queues = false;    // on a device that works behind the host's back
  bool graphs = false;       // that is, as graphs
  bool on_loopback = false;  // on such devices that share their memory
  bool fuses = true;         // kernels, where the device has fused ones
};

// Trains on one thread per rank. What rank 0 returns; errors of other ranks
// are test failures unless rank 0 fails too.
inline Result<TrainingResult> TrainTiny(const Graph& graph,
                                        const TaskGraph& tasks,
                                        const TokenData& data,
                                        const TinyRun& run) {
  const int ranks = static_cast<int>(tasks.group(tasks.world).devices.size());
  std::vector<std::unique_ptr<QueueCpuDevice>> shared;
  std::vector<QueueDevice*> queue_devices;
  for (int rank = 0; run.on_loopback && rank < ranks; ++rank) {
    shared.push_back(
        std::make_unique<QueueCpuDevice>(static_cast<uint64_t>(rank)));
    queue_devices.push_back(shared.back().get());
  }
  const CommOptions comm{Duration::FromSeconds(60)};
  auto worlds = run.on_loopback ? MakeLoopbackWorlds(queue_devices, comm)
                                : MakeThreadWorlds(ranks, comm);
  std::vector<std::optional<Result<TrainingResult>>> results(
      static_cast<size_t>(ranks));
  RunThreads(ranks, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    CpuDevice device;
    QueueCpuDevice queues(r);
    const auto queue_world = MakeQueueWorld(*worlds[r], queues);
    TrainingJob job;
    job.graph = &graph;
    job.tasks = &tasks;
    job.layout.family = run.family;
    job.export_folder = run.export_folder;
    job.export_file_bytes = run.export_file_bytes;
    job.options = run.options;
    job.seed = run.seed;
    job.steps = run.steps;
    std::optional<Batches> rows;
    job.load = LoadAtRandom(data, run.seed, graph);
    if (RowKindOf(graph) != RowKind::kNextToken) {
      BatchOptions options = BatchOptionsOf(graph);
      options.seed = run.seed;
      options.vocabulary = kTinyVocabulary;
      options.end_of_text = 3;
      rows.emplace(Batches::Make(data, options).value());
      job.load = LoadTraining(*rows);
    }
    job.world = run.in_queues ? queue_world.get() : worlds[r].get();
    job.device = &device;
    if (run.in_queues) job.device = &queues;
    if (run.on_loopback) job.device = queue_devices[r];
    job.load_path = run.load_path;
    job.save_path = run.save_path;
    job.save_every = run.save_every;
    job.keep_checkpoints = run.keep_checkpoints;
    job.stop = run.stop;
    job.progress = run.progress;
    job.learning_rate = run.learning_rate;
    job.graphs = run.graphs;
    job.fuses = run.fuses;
    if (run.batches != nullptr) {
      const Batches& batches = *run.batches;
      job.load = LoadTraining(batches);
      job.validation = {run.validate_every,
                        batches.options().validation_batches,
                        LoadValidation(batches), [&batches](int64_t batch) {
                          return batches.ValidationLabels(batch);
                        }};
    }
    results[r] = Train(job);
    worlds[r].reset();
  });
  if (*results[0]) {
    for (size_t r = 1; r < results.size(); ++r) {
      EXPECT_TRUE(results[r]->has_value()) << results[r]->error().ToString();
      if (!*results[r]) continue;
      EXPECT_EQ((*results[r])->losses, (*results[0])->losses) << "rank " << r;
    }
  }
  return *std::move(results[0]);
}

// The elements of a weight (or of its optimizer state) in a checkpoint.
inline std::vector<double> ReadTensor(const SafetensorsFile& file,
                                      const std::string& name,
                                      const Tensor& tensor) {
  const std::byte* bytes =
      file.Find({name, tensor.dtype, tensor.shape}).value();
  const int64_t elements = ElementCount(tensor.shape);
  std::vector<double> values;
  for (int64_t i = 0; i < elements; ++i) {
    if (tensor.dtype == DType::kFloat64) {
      double value = 0;
      std::memcpy(&value, bytes + i * 8, 8);
      values.push_back(value);
    } else {
      float value = 0;
      std::memcpy(&value, bytes + i * 4, 4);
      values.push_back(value);
    }
  }
  return values;
}

}  // namespace tessera

// Published weights: read into any plan's shards, and written back as they
// were, byte by byte.

#include "runtime/published_files.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <span>
#include <string>

#include "planner/base/element_count.h"
#include "planner/base/file.h"
#include "planner/base/leftovers.h"
#include "planner/io/json_value.h"
#include "runtime/float16.h"
#include "runtime/placement.h"
#include "runtime/weight_export.h"
#include "tests/support/tiny_training.h"
#include "tests/unit/runtime/disk.h"

namespace tessera {
namespace {

class PublishedFilesTest : public ::testing::Test {
 protected:
  const std::string folder_ = TempPath("published");
  const std::string back_ = TempPath("back");
  const std::string checkpoint_ = TempPath("checkpoint.safetensors");

  void SetUp() override { std::filesystem::create_directories(folder_); }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    std::filesystem::remove_all(back_);
    std::filesystem::remove(checkpoint_);
  }
};

// A value that fits in 8 bits of fraction, different for neighbours.
float ValueAt(size_t tensor, int64_t i) {
  return static_cast<float>((i * 7 + static_cast<int64_t>(tensor) * 31) % 251 -
                            125) /
         256;
}

struct Given {
  std::string name;
  Shape shape;
};

std::vector<std::byte> ElementsOfGiven(const Given& given, size_t number,
                                       DType dtype) {
  const int64_t n = ElementCount(given.shape);
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(ValueAt(number, i));
  std::vector<std::byte> bytes(values.size() *
                               static_cast<size_t>(SizeOf(dtype)));
  if (dtype == DType::kFloat32) {
    std::memcpy(bytes.data(), values.data(), bytes.size());
  } else {
    Narrow(values.data(), n, dtype, bytes.data());
  }
  return bytes;
}

void WriteGiven(const std::string& path, const std::vector<Given>& tensors,
                size_t begin, size_t end, DType dtype) {
  std::vector<SafetensorsEntry> entries;
  for (size_t t = begin; t < end; ++t) {
    entries.push_back({tensors[t].name, dtype, tensors[t].shape});
  }
  auto writer = *SafetensorsWriter::Create(path, entries, {{"format", "pt"}});
  for (size_t t = begin; t < end; ++t) {
    ASSERT_TRUE(
        writer.Write(ElementsOfGiven(tensors[t], t, dtype)).has_value());
  }
  ASSERT_TRUE(writer.Commit().has_value());
}

// Tokens from 1 on.
TokenData TokensWithoutTheFirst() {
  const std::string path = TempPath("tokens.bin");
  std::ofstream file(path, std::ios::binary);
  for (uint64_t i = 0; i < 1000; ++i) {
    const auto token = static_cast<uint16_t>(
        1 + Mix64(i) % static_cast<uint64_t>(kTinyVocabulary - 1));
    file.write(reinterpret_cast<const char*>(&token), sizeof(token));
  }
  file.close();
  auto data = OpenTokens(path, kTinyVocabulary);
  std::filesystem::remove(path);
  return std::move(data).value();
}

// The tensors of GPT-2, as transformers writes them: by name, Conv1D's weights
// inputs by outputs.
std::vector<Given> Gpt2Tensors(int layers, int64_t hidden) {
  std::vector<Given> tensors;
  for (int l = 0; l < layers; ++l) {
    const std::string h = "h." + std::to_string(l) + ".";
    tensors.insert(tensors.end(),
                   {{h + "attn.c_attn.bias", {3 * hidden}},
                    {h + "attn.c_attn.weight", {hidden, 3 * hidden}},
                    {h + "attn.c_proj.bias", {hidden}},
                    {h + "attn.c_proj.weight", {hidden, hidden}},
                    {h + "ln_1.bias", {hidden}},
                    {h + "ln_1.weight", {hidden}},
                    {h + "ln_2.bias", {hidden}},
                    {h + "ln_2.weight", {hidden}},
                    {h + "mlp.c_fc.bias", {4 * hidden}},
                    {h + "mlp.c_fc.weight", {hidden, 4 * hidden}},
                    {h + "mlp.c_proj.bias", {hidden}},
                    {h + "mlp.c_proj.weight", {4 * hidden, hidden}}});
  }
  tensors.insert(tensors.end(), {{"ln_f.bias", {hidden}},
                                 {"ln_f.weight", {hidden}},
                                 {"wpe.weight", {8, hidden}},
                                 {"wte.weight", {40, hidden}}});
  return tensors;
}

TEST_F(PublishedFilesTest, Gpt2ComesBackByteByByteFromAnyPlan) {
  const Graph graph = ImportTiny(TinyGpt2(2, 4), 4, 8, DType::kFloat32);
  const std::vector<Given> tensors = Gpt2Tensors(2, 16);
  const std::string file = folder_ + "/model.safetensors";
  WriteGiven(file, tensors, 0, tensors.size(), DType::kFloat32);
  const TokenData data = TinyTokens();
  std::optional<double> loss;
  for (const char* strategy :
       {"mbs=4", "dp=2,tp=2,zero=1,sp=1", "dp=2,pp=2,zero=3", "dp=1,tp=4"}) {
    SCOPED_TRACE(strategy);
    const int ranks = std::string(strategy) == "mbs=4" ? 1 : 4;
    const auto tasks = LowerStrategy(graph, ranks, strategy, {});
    ASSERT_TRUE(tasks.has_value()) << tasks.error().ToString();
    TinyRun run;
    run.steps = 1;
    run.options.learning_rate = 0;
    run.family = "gpt2";
    run.load_path = folder_;
    run.save_path = checkpoint_;
    run.export_folder = back_;
    const auto trained = TrainTiny(graph, *tasks, data, run);
    ASSERT_TRUE(trained.has_value()) << trained.error().ToString();
    EXPECT_TRUE(*ReadFile(back_ + "/model.safetensors") == *ReadFile(file));
    EXPECT_FALSE(
        std::filesystem::exists(back_ + "/model.safetensors.index.json"));
    std::filesystem::remove_all(back_);
    if (!loss) loss = trained->losses[0];
    EXPECT_NEAR(trained->losses[0], *loss, 1e-5);
  }
  // Key 5 on input 3: row 3, column 16 + 5 of c_attn, which is tensor 13.
  const auto saved = *SafetensorsFile::Open(checkpoint_);
  float key = 0;
  std::memcpy(
      &key,
      *saved.Find({"h.1.attn.c_attn.k.weight", DType::kFloat32, {4, 4, 16}}) +
          (5 * 16 + 3) * sizeof(float),
      sizeof(float));
  EXPECT_EQ(key, ValueAt(13, 3 * 48 + 16 + 5));
}

// A table of 40 tokens in a model of 64 rows, of which the files have none but
// those of tokens.
TEST_F(PublishedFilesTest, PaddingOfAVocabularyIsInNoFile) {
  std::string config = TinyGpt2(1, 4);
  config.insert(1, R"("vocab_multiple": 64, )");
  const Graph graph = ImportTiny(config, 4, 8, DType::kFloat32);
  std::vector<Given> tensors = Gpt2Tensors(1, 16);
  const std::string file = folder_ + "/model.safetensors";
  WriteGiven(file, tensors, 0, tensors.size(), DType::kFloat32);
  for (const char* strategy :
       {"dp=4,mbs=1,zero=3", "dp=2,tp=2,zero=1,sp=1", "dp=1,tp=4"}) {
    SCOPED_TRACE(strategy);
    const auto tasks = LowerStrategy(graph, 4, strategy, {});
    ASSERT_TRUE(tasks.has_value()) << tasks.error().ToString();
    TinyRun run;
    run.steps = 1;
    run.options.learning_rate = 0;
    run.family = "gpt2";
    run.load_path = folder_;
    run.save_path = checkpoint_;
    run.export_folder = back_;
    const auto trained = TrainTiny(graph, *tasks, TinyTokens(), run);
    ASSERT_TRUE(trained.has_value()) << trained.error().ToString();
    EXPECT_TRUE(*ReadFile(back_ + "/model.safetensors") == *ReadFile(file));
    std::filesystem::remove_all(back_);
  }
  // The checkpoint has all rows; wte is tensor 15, behind 12 of the layer and
  // 3 more.
  const auto saved = *SafetensorsFile::Open(checkpoint_);
  const auto wte =
      std::ranges::find(graph.tensors, "wte.weight", &Tensor::name);
  ASSERT_EQ(wte->shape, (Shape{64, 16}));
  const std::vector<double> table = ReadTensor(saved, wte->name, *wte);
  for (int64_t i = 0; i < 64 * 16; ++i) {
    ASSERT_EQ(table[static_cast<size_t>(i)], i < 40 * 16 ? ValueAt(15, i) : 0)
        << i;
  }
  // A head of the file's own is still told from the table.
  const PublishedLayout layout = {.family = "gpt2"};
  tensors.push_back({"lm_head.weight", tensors.back().shape});
  WriteGiven(file, tensors, 0, tensors.size(), DType::kFloat32);
  EXPECT_EQ(PublishedFiles::Open(file, layout, graph)->HeadThatDiffers(),
            "lm_head.weight");
}

// Llama in bf16, in three files with an index: nothing is transposed; four
// query heads and two of keys.
TEST_F(PublishedFilesTest, LlamaComesBackFromShards) {
  const Graph graph = ImportTiny(TinyLlama(1), 4, 8, DType::kBFloat16);
  const std::string m = "model.";
  const std::string l = m + "layers.0.";
  const std::vector<Given> tensors = {
      {"lm_head.weight", {40, 16}},
      {m + "embed_tokens.weight", {40, 16}},
      {l + "input_layernorm.weight", {16}},
      {l + "mlp.down_proj.weight", {16, 24}},
      {l + "mlp.gate_proj.weight", {24, 16}},
      {l + "mlp.up_proj.weight", {24, 16}},
      {l + "post_attention_layernorm.weight", {16}},
      {l + "self_attn.k_proj.weight", {8, 16}},
      {l + "self_attn.o_proj.weight", {16, 16}},
      {l + "self_attn.q_proj.weight", {16, 16}},
      {l + "self_attn.v_proj.weight", {8, 16}},
      {m + "norm.weight", {16}}};
  // At most 3,000 bytes, two an element: 640 + 640 + 16 elements; 3 * 384 + 16
  // + 128; the rest.
  const size_t begins[] = {0, 3, 8, tensors.size()};
  const std::string names[] = {"model-00001-of-00003.safetensors",
                               "model-00002-of-00003.safetensors",
                               "model-00003-of-00003.safetensors"};
  std::string index = R"({"metadata": {"total_size": 7264}, "weight_map": {)";
  for (size_t f = 0; f < 3; ++f) {
    WriteGiven(folder_ + "/" + names[f], tensors, begins[f], begins[f + 1],
               DType::kBFloat16);
    for (size_t t = begins[f]; t < begins[f + 1]; ++t) {
      index += (t == 0 ? "\"" : ", \"") + tensors[t].name + "\": \"" +
               names[f] + "\"";
    }
  }
  std::ofstream(folder_ + "/model.safetensors.index.json") << index << "}}";

  const auto tasks = LowerStrategy(graph, 4, "dp=2,tp=2,zero=1", {});
  ASSERT_TRUE(tasks.has_value()) << tasks.error().ToString();
  TinyRun run;
  run.steps = 1;
  run.options.learning_rate = 0;
  run.family = "llama";
  run.load_path = folder_ + "/model.safetensors.index.json";
  run.export_folder = back_;
  run.export_file_bytes = {3000};
  const auto trained = TrainTiny(graph, *tasks, TinyTokens(), run);
  ASSERT_TRUE(trained.has_value()) << trained.error().ToString();
  for (const std::string& name : names) {
    EXPECT_TRUE(*ReadFile(back_ + "/" + name) ==
                *ReadFile(folder_ + "/" + name))
        << name;
  }
  const auto written = ReadJson(back_ + "/model.safetensors.index.json");
  const auto given = ReadJson(run.load_path);
  ASSERT_TRUE(written.has_value()) << written.error().ToString();
  EXPECT_EQ(written->Field("weight_map").ToString(),
            given->Field("weight_map").ToString());
}

// A head of the file's own beside the table that the model has for it.
TEST_F(PublishedFilesTest, AHeadThatIsNotTheTableIsNamed) {
  const Graph graph = ImportTiny(TinyGpt2(1, 4), 4, 8, DType::kFloat32);
  std::vector<Given> tensors = Gpt2Tensors(1, 16);
  const std::string file = folder_ + "/model.safetensors";
  const PublishedLayout layout = {.family = "gpt2"};
  WriteGiven(file, tensors, 0, tensors.size(), DType::kFloat32);
  EXPECT_EQ(PublishedFiles::Open(file, layout, graph)->HeadThatDiffers(), "");
  // Other values than those of the table, which is the tensor before.
  tensors.push_back({"lm_head.weight", tensors.back().shape});
  WriteGiven(file, tensors, 0, tensors.size(), DType::kFloat32);
  EXPECT_EQ(PublishedFiles::Open(file, layout, graph)->HeadThatDiffers(),
            "lm_head.weight");
}

// A wish to stop that comes behind the last step.
TEST_F(PublishedFilesTest, AnInterruptedExportLeavesNothing) {
  const Graph graph = ImportTiny(TinyGpt2(1, 4), 4, 8, DType::kFloat32);
  const auto tasks = LowerStrategy(graph, 2, "dp=2", {});
  std::atomic<bool> stop = false;
  TinyRun run;
  run.steps = 1;
  run.family = "gpt2";
  run.export_folder = back_;
  run.export_file_bytes = {3000};
  run.stop = &stop;
  run.progress = [&](const StepReport&) -> Result<void> {
    stop = true;
    return {};
  };
  const auto trained = TrainTiny(graph, *tasks, TinyTokens(), run);
  ASSERT_FALSE(trained.has_value());
  EXPECT_EQ(trained.error().code, ErrorCode::kInterrupted);
  EXPECT_FALSE(std::filesystem::exists(back_));
  // None of the folders that were made for it either.
  run.export_folder = back_ + "/of/it";
  stop = false;
  EXPECT_FALSE(TrainTiny(graph, *tasks, TinyTokens(), run).has_value());
  EXPECT_FALSE(std::filesystem::exists(back_));
  std::filesystem::create_directory(back_);
  stop = false;
  EXPECT_FALSE(TrainTiny(graph, *tasks, TinyTokens(), run).has_value());
  EXPECT_TRUE(std::filesystem::is_empty(back_));
}

TEST_F(PublishedFilesTest, AFolderThatCannotBeReadIsAnError) {
  EXPECT_TRUE(CheckHasNoWeights(folder_ + "/none").has_value());
  const std::string file = folder_ + "/file";
  std::ofstream(file) << "no folder";
  const auto unread = CheckHasNoWeights(file);
  ASSERT_FALSE(unread.has_value());
  EXPECT_EQ(unread.error().ToString(),
            file + ": cannot read the folder: Not a directory");
}

// Locks of checkpoints are none, whatever these are called.
TEST_F(PublishedFilesTest, WeightsHaveNamesOfTheirOwn) {
  for (const char* const name :
       {"model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "model.fp16.safetensors"}) {
    EXPECT_TRUE(IsNameOfWeights(name)) << name;
  }
  for (const char* const name :
       {"model.safetensors.lock", "config.json", "model.json",
        "tiny.safetensors", "model.safetensors.tmp.host.7.0"}) {
    EXPECT_FALSE(IsNameOfWeights(name)) << name;
    std::ofstream(folder_ + "/" + name);
  }
  std::filesystem::remove(folder_ + "/model.safetensors");
  EXPECT_TRUE(CheckHasNoWeights(folder_).has_value());
}

// Where another run has put them there since this one began.
TEST_F(PublishedFilesTest, WeightsThatAreThereStay) {
  const Graph graph = ImportTiny(TinyGpt2(1, 4), 4, 8, DType::kFloat32);
  const auto tasks = LowerStrategy(graph, 2, "dp=2", {});
  TinyRun run;
  run.steps = 1;
  run.family = "gpt2";
  run.export_folder = back_;
  std::filesystem::create_directories(back_);
  for (const char* const name :
       {"model.safetensors", "model-00002-of-00003.safetensors",
        "model.safetensors.index.json"}) {
    std::ofstream(back_ + "/" + name) << "another's";
    const auto trained = TrainTiny(graph, *tasks, TinyTokens(), run);
    ASSERT_FALSE(trained.has_value());
    EXPECT_EQ(trained.error().ToString(),
              back_ + ": has weights already: " + name);
    EXPECT_EQ(*ReadFile(back_ + "/" + name), "another's");
    std::filesystem::remove(back_ + "/" + name);
    EXPECT_TRUE(std::filesystem::is_empty(back_));
  }
}

// Files may not grow beyond 2 KiB: the first, of a bias of 192 bytes, does not,
// the second, of a matrix of 3,072, would.
TEST_F(PublishedFilesTest, AnExportThatFailsLeavesNothing) {
  const Graph graph = ImportTiny(TinyGpt2(1, 4), 4, 8, DType::kFloat32);
  const auto tasks = LowerStrategy(graph, 2, "dp=2", {});
  const TokenData data = TinyTokens();
  TinyRun run;
  run.steps = 1;
  run.family = "gpt2";
  run.export_folder = back_;
  run.export_file_bytes = {1000};
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{2 << 10, 2 << 10};
    setrlimit(RLIMIT_FSIZE, &limit);
    const auto trained = TrainTiny(graph, *tasks, data, run);
    if (trained) _exit(1);
    const std::string error = trained.error().ToString();
    _exit(error == back_ + ": cannot write: File too large" ? 0 : 2);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_FALSE(std::filesystem::exists(back_));
  // With room the first file is one of several.
  ASSERT_TRUE(TrainTiny(graph, *tasks, data, run).has_value());
  const auto index = ReadJson(back_ + "/model.safetensors.index.json");
  const JsonValue& files = index->Field("weight_map");
  EXPECT_NE(files.Field("h.0.attn.c_attn.bias").text,
            files.Field("h.0.attn.c_attn.weight").text);
}

// Killed behind each file and name that comes to the disk: either all is there,
// or the next run may export to the same folder, and leaves what is its own.
TEST_F(PublishedFilesTest, AnExportThatWasKilledIsNotInTheWay) {
  const Graph graph = ImportTiny(TinyGpt2(1, 4), 4, 8, DType::kFloat32);
  const auto tasks = LowerStrategy(graph, 2, "dp=2", {});
  const TokenData data = TinyTokens();
  TinyRun run;
  run.steps = 1;
  run.family = "gpt2";
  run.export_folder = back_;
  const std::string index = back_ + "/model.safetensors.index.json";
  int blocking = 0;  // kills that left a name in its place without the index
  for (int fsyncs = 1;; ++fsyncs) {
    SCOPED_TRACE(fsyncs);
    run.export_file_bytes = {3000};
    const pid_t child = fork();
    if (child == 0) {
      fsyncs_to_live = fsyncs;
      _exit(TrainTiny(graph, *tasks, data, run).has_value() ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status));
    if (WEXITSTATUS(status) == 0) break;
    ASSERT_EQ(WEXITSTATUS(status), kKilled);
    if (!std::filesystem::exists(index)) {
      int named = 0;
      for (const auto& entry : std::filesystem::directory_iterator(back_)) {
        named += entry.path().extension() == ".safetensors" ? 1 : 0;
      }
      blocking += named;
      EXPECT_TRUE(CheckHasNoWeights(back_).has_value());
      // As many files, or fewer.
      if (fsyncs % 2 == 0) run.export_file_bytes = {4000};
      ::testing::internal::CaptureStderr();
      const auto again = TrainTiny(graph, *tasks, data, run);
      const std::string said = ::testing::internal::GetCapturedStderr();
      ASSERT_TRUE(again.has_value()) << again.error().ToString();
      // What had its name is told of.
      EXPECT_EQ(said.find(back_ + ": removed model-00001-of-") != said.npos,
                named > 0)
          << said;
    }
    std::set<std::string> expected = {"model.safetensors.index.json"};
    const auto read = ReadJson(index);
    ASSERT_TRUE(read.has_value()) << read.error().ToString();
    for (const auto& [tensor, file] : read->Field("weight_map").fields) {
      expected.insert(file.text);
    }
    EXPECT_GT(expected.size(), 3u);
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(back_)) {
      names.insert(entry.path().filename());
    }
    EXPECT_EQ(names, expected);
    std::filesystem::remove_all(back_);
  }
  EXPECT_GT(blocking, 0);
}

// A run's own files are known by their tensors and by their time.
TEST_F(PublishedFilesTest, WeightsThatWereNotLeftStay) {
  const pid_t child = fork();
  if (child == 0) _exit(0);
  waitpid(child, nullptr, 0);
  const std::string index =
      PrefixBeside(folder_ + "/model.safetensors.index.json") +
      std::to_string(child) + ".0";
  std::ofstream(index)
      << R"({"weight_map": {"a": "model-00001-of-00002.safetensors"}})";
  const std::string file = folder_ + "/model-00001-of-00002.safetensors";
  const auto indexed = std::filesystem::last_write_time(index);
  const auto is_left = [&](const std::string& tensor,
                           std::chrono::seconds later) {
    WriteGiven(file, {{tensor, {2}}}, 0, 1, DType::kFloat32);
    std::filesystem::last_write_time(file, indexed + later);
    return CheckHasNoWeights(folder_).has_value();
  };
  EXPECT_TRUE(is_left("a", std::chrono::seconds(-1)));
  EXPECT_FALSE(is_left("a", std::chrono::seconds(1)));
  EXPECT_FALSE(is_left("b", std::chrono::seconds(-1)));
}

// ONNX has such names.
TEST_F(PublishedFilesTest, NamesWithQuotesAreEscaped) {
  const std::string name = R"(a "b" \c)";
  Graph graph = ImportTiny(TinyGpt2(1, 4), 4, 8, DType::kFloat32);
  std::ranges::find(graph.tensors, TensorKind::kWeight, &Tensor::kind)->name =
      name;
  const auto tasks = LowerStrategy(graph, 1, "mbs=4", {});
  TinyRun run;
  run.steps = 1;
  run.export_folder = back_;
  run.export_file_bytes = {3000};
  ASSERT_TRUE(TrainTiny(graph, *tasks, TinyTokens(), run).has_value());
  const auto index = ReadJson(back_ + "/model.safetensors.index.json");
  ASSERT_TRUE(index.has_value()) << index.error().ToString();
  const std::string file = index->Field("weight_map").Field(name).text;
  const auto shard = SafetensorsFile::Open(back_ + "/" + file);
  ASSERT_TRUE(shard.has_value()) << shard.error().ToString();
  EXPECT_TRUE(shard->View(name).has_value());
}

// Files stay open until all are written.
TEST_F(PublishedFilesTest, AnExportMayHaveMoreFilesThanDescriptors) {
  const Graph graph = ImportTiny(TinyGpt2(1, 4), 4, 8, DType::kFloat32);
  const auto tasks = LowerStrategy(graph, 1, "mbs=4", {});
  const TokenData data = TinyTokens();
  TinyRun run;
  run.steps = 1;
  run.family = "gpt2";
  run.export_folder = back_;
  run.export_file_bytes = {1};  // a file for each of 16 tensors
  const pid_t child = fork();
  if (child == 0) {
    rlimit limit = {};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 16;
    setrlimit(RLIMIT_NOFILE, &limit);
    _exit(TrainTiny(graph, *tasks, data, run).has_value() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_TRUE(
      std::filesystem::exists(back_ + "/model-00016-of-00016.safetensors"));
}

// The row of a token that the data has not: its master is finite, and what fp16
// makes of it is not. From 65,520 on fp16 rounds to infinity.
TEST_F(PublishedFilesTest, WhatIsNotFiniteInTheFilesIsNotLeft) {
  const Graph graph = ImportTiny(TinyLlama(1), 4, 8, DType::kFloat16);
  const auto tasks = LowerStrategy(graph, 2, "dp=2", {});
  ASSERT_TRUE(tasks.has_value()) << tasks.error().ToString();
  TinyRun run;
  run.steps = 1;
  run.options.learning_rate = 0;
  run.family = "llama";
  const std::string start = folder_ + "/model.safetensors";
  run.export_folder = folder_;
  ASSERT_TRUE(TrainTiny(graph, *tasks, TinyTokens(), run).has_value());
  // All weights in fp32, with one of the table's other than it was.
  const auto rewrite = [&](float value) {
    std::vector<SafetensorsEntry> entries;
    std::vector<std::vector<float>> contents;
    const auto file = *SafetensorsFile::Open(start);
    for (const std::string& name : file.names()) {
      const TensorView view = *file.View(name);
      entries.push_back({name, DType::kFloat32, view.shape});
      const int64_t elements = ElementCount(view.shape);
      contents.emplace_back(static_cast<size_t>(elements));
      Widen(view.data, view.dtype, elements, contents.back().data());
      if (name == "model.embed_tokens.weight") contents.back()[0] = value;
    }
    auto writer = *SafetensorsWriter::Create(checkpoint_, entries, {});
    for (const auto& values : contents) {
      ASSERT_TRUE(writer.Write(std::as_bytes(std::span(values))).has_value());
    }
    ASSERT_TRUE(writer.Commit().has_value());
  };
  run.load_path = checkpoint_;
  run.export_folder = back_;
  for (const float value : {65519.0F, 65520.0F}) {
    SCOPED_TRACE(value);
    rewrite(value);
    const auto trained = TrainTiny(graph, *tasks, TokensWithoutTheFirst(), run);
    ASSERT_TRUE(trained.has_value()) << trained.error().ToString();
    EXPECT_EQ(trained->exported, value < 65520);
    EXPECT_EQ(std::filesystem::exists(back_), value < 65520);
    std::filesystem::remove_all(back_);
  }
}

TEST_F(PublishedFilesTest, WhatIsMissingOrOfAnotherShapeIsNamed) {
  const Graph graph = ImportTiny(TinyGpt2(1, 4), 4, 8, DType::kFloat32);
  std::vector<Given> tensors = Gpt2Tensors(1, 16);
  const std::string file = folder_ + "/model.safetensors";
  const auto message = [&](const std::vector<Given>& given) {
    WriteGiven(file, given, 0, given.size(), DType::kFloat32);
    TinyRun run;
    run.steps = 1;
    run.family = "gpt2";
    run.load_path = file;
    const auto tasks = LowerStrategy(graph, 1, "mbs=4", {});
    const auto trained = TrainTiny(graph, *tasks, TinyTokens(), run);
    return trained ? "" : trained.error().ToString();
  };
  // A file that was saved with its head.
  std::vector<Given> with_prefix = tensors;
  for (Given& given : with_prefix) given.name = "transformer." + given.name;
  EXPECT_EQ(message(with_prefix), "");
  // Dense layers in place of Conv1D.
  std::vector<Given> dense = tensors;
  dense[9].shape = {64, 16};
  EXPECT_EQ(message(dense),
            file +
                ": tensor 'h.0.mlp.c_fc.weight': is F32[64, 16]: expected "
                "F32[16, 64] or another float");
  // A deeper model's: the second layer would be left out.
  EXPECT_EQ(message(Gpt2Tensors(2, 16)),
            file +
                ": tensor 'h.1.attn.c_attn.bias': is no weight of the model, "
                "nor are 11 more");
  std::vector<Given> with_masks = tensors;
  with_masks.push_back({"h.0.attn.bias", {1, 1, 8, 8}});
  with_masks.push_back({"lm_head.weight", {40, 16}});
  EXPECT_EQ(message(with_masks), "");
  tensors.erase(tensors.begin() + 4);
  EXPECT_EQ(message(tensors), file + ": tensor 'h.0.ln_1.bias': is missing");
  std::filesystem::remove(file);  // which is read where there are both
  std::ofstream(folder_ + "/model.safetensors.index.json") << "{}";
  const PublishedLayout layout = {.family = "gpt2"};
  EXPECT_EQ(PublishedFiles::Open(folder_, layout, graph).error().ToString(),
            folder_ +
                "/model.safetensors.index.json: weight_map: names no files: "
                "expected an object of tensors' files");
}

// Every family's weights, whole, from files with what published ones have, and
// from those with transformers 5's names and fused experts.
TEST_F(PublishedFilesTest, EveryFormOfAFileGivesTheSameWeights) {
  for (const std::string& config :
       {TinyBert(1), TinyT5(1), TinyT5(1, /*gated=*/true), TinyVit(1),
        TinyResNet(), TinyDeepseek(2), TinyMixtral(1),
        TinyQwen(1, /*experts=*/true)}) {
    SCOPED_TRACE(config);
    const PublishedLayout layout = {
        .family = ParseJson(config)->Field("model_type").text};
    const Graph graph = ImportTiny(config, 4, 8, DType::kFloat32);
    std::map<const Tensor*, std::vector<float>> weights;
    for (const Tensor& weight : graph.tensors) {
      if (weight.kind != TensorKind::kWeight) continue;
      std::vector<float>& values = weights[&weight];
      for (int64_t i = 0; i < ElementCount(weight.shape); ++i) {
        values.push_back(ValueAt(weights.size(), i));
      }
    }
    for (const bool in_memory : {false, true}) {
      SCOPED_TRACE(in_memory);
      const auto tensors = PublishedTensors(
          layout, graph,
          in_memory ? PublishedExperts::kFused : PublishedExperts::kEach);
      std::vector<SafetensorsEntry> entries;
      for (const PublishedTensor& tensor : tensors) {
        entries.push_back({in_memory
                               ? OtherPublishedName(layout.family, tensor.name)
                               : tensor.name,
                           DType::kFloat32, tensor.shape});
      }
      const std::string file = folder_ + "/model.safetensors";
      auto writer = *SafetensorsWriter::Create(file, entries, {});
      for (const PublishedTensor& tensor : tensors) {
        std::vector<float> elements(
            static_cast<size_t>(ElementCount(tensor.shape)));
        for (const auto& [weight, piece] : tensor.parts) {
          PutPiece(piece, weights[weight].data(), elements.data());
        }
        ASSERT_TRUE(
            writer.Write(std::as_bytes(std::span(elements))).has_value());
      }
      ASSERT_TRUE(writer.Commit().has_value());
      const auto files = PublishedFiles::Open(file, layout, graph);
      ASSERT_TRUE(files.has_value()) << files.error().ToString();
      for (const auto& [weight, values] : weights) {
        const auto read =
            files->Read(*weight, WholeBlock(WholeBox(weight->shape)));
        ASSERT_TRUE(read.has_value()) << read.error().ToString();
        EXPECT_EQ(*read, values) << weight->name;
      }
    }
  }
}

// What files have beside a model's weights: heads of other classes, and of
// DeepSeek-V3 a layer for a further token, are passed over; a layer that the
// model lacks is not.
TEST_F(PublishedFilesTest, PartsThatAreLeftOutAreCounted) {
  const std::string file = folder_ + "/model.safetensors";
  const auto opened = [&](const std::string& config,
                          const std::vector<Given>& more) {
    const Graph graph = ImportTiny(config, 4, 8, DType::kFloat32);
    const PublishedLayout layout = {
        .family = ParseJson(config)->Field("model_type").text};
    std::vector<Given> tensors;
    for (const auto& tensor : PublishedTensors(layout, graph)) {
      tensors.push_back({tensor.name, tensor.shape});
    }
    tensors.insert(tensors.end(), more.begin(), more.end());
    WriteGiven(file, tensors, 0, tensors.size(), DType::kFloat32);
    const auto files = PublishedFiles::Open(file, layout, graph);
    if (!files) return files.error().ToString();
    std::string lines;
    for (const std::string& line : files->passed_over()) lines += line + "\n";
    return lines;
  };
  const std::vector<Given> tied = {{"bert.embeddings.position_ids", {1, 8}},
                                   {"cls.predictions.decoder.weight", {40, 16}},
                                   {"cls.predictions.decoder.bias", {40}}};
  EXPECT_EQ(opened(TinyBert(1), tied), "");
  EXPECT_EQ(opened(TinyBert(1),
                   {{"classifier.weight", {2, 16}}, {"classifier.bias", {2}}}),
            "2 tensors of a head that the model has not are passed over, such "
            "as 'classifier.bias'\n");
  EXPECT_EQ(opened(TinyBert(1), {{"bert.encoder.layer.1.a.weight", {2}}}),
            file +
                ": tensor 'bert.encoder.layer.1.a.weight': is no weight of the "
                "model");
  const std::string biases =
      "1 tensor of biases of routers' choices is passed over: "
      "'model.layers.1.mlp.gate.e_score_correction_bias'\n";
  EXPECT_EQ(opened(TinyDeepseek(2), {}), biases);
  const Given norm = {"model.layers.2.input_layernorm.weight", {16}};
  EXPECT_EQ(opened(TinyDeepseek(2),
                   {norm, {"model.layers.2.eh_proj.weight", {16, 32}}}),
            biases +
                "2 tensors of layers that predict further tokens are passed "
                "over, such as 'model.layers.2.eh_proj.weight'\n");
  EXPECT_EQ(opened(TinyDeepseek(2), {norm}),
            file +
                ": tensor 'model.layers.2.input_layernorm.weight': is no "
                "weight of the model");
}

}  // namespace
}  // namespace tessera

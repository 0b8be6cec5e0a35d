// Checkpoints and the training loop around them, on tiny models.

#include "runtime/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <map>
#include <set>

#include "runtime/loss_scale.h"
#include "runtime/older_checkpoints.h"
#include "tests/support/file_bytes.h"
#include "tests/support/tiny_training.h"
#include "tests/unit/runtime/disk.h"

namespace tessera {
namespace {

using testing::ReadBytes;
using testing::WriteBytes;

class Checkpoint : public ::testing::Test {
 protected:
  TaskGraph Tasks(int ranks, const std::string& strategy,
                  const TrainingOptions& options = {}) {
    auto tasks = LowerStrategy(graph_, ranks, strategy, options);
    TESSERA_CHECK(tasks.has_value()) << tasks.error().ToString();
    return std::move(tasks).value();
  }

  // By rank: what ends a step of two ranks whose jobs `change` makes.
  template <typename Change>
  std::vector<std::string> ErrorsOfTwoRanks(
      const TaskGraph& tasks, Change change,
      Duration timeout = Duration::FromSeconds(30)) {
    auto worlds = MakeThreadWorlds(2, {timeout});
    std::vector<std::string> errors(2);
    RunThreads(2, [&](int rank) {
      const auto r = static_cast<size_t>(rank);
      CpuDevice device;
      TrainingJob job;
      job.graph = &graph_;
      job.tasks = &tasks;
      job.learning_rate = LearningRate{.peak = 1e-3};
      job.world = worlds[r].get();
      job.device = &device;
      job.load = LoadAtRandom(data_, 0, graph_);
      change(rank, job);
      const auto result = Train(job);
      if (!result) errors[r] = result.error().ToString();
    });
    return errors;
  }

  const Graph graph_ = ImportTiny(TinyGpt2(2, 4), 4, 8, DType::kFloat32);
  const TokenData data_ = TinyTokens();
  const std::string path_ = TempPath("checkpoint.safetensors");
  const std::string other_ = TempPath("other.safetensors");

  void TearDown() override {
    std::filesystem::remove(path_);
    std::filesystem::remove(other_);
  }
};

TEST_F(Checkpoint, ResumeIsExact) {
  for (const char* strategy :
       {"dp=2,tp=2,pp=1,zero=1", "dp=2,tp=1,pp=2,zero=1", "dp=1,tp=2,pp=2"}) {
    SCOPED_TRACE(strategy);
    const TaskGraph tasks = Tasks(4, strategy);
    TinyRun whole;
    whole.steps = 6;
    whole.save_path = path_;
    const auto straight = *TrainTiny(graph_, tasks, data_, whole);
    const std::string expected = ReadBytes(path_);

    TinyRun first = whole;
    first.steps = 2;
    first.save_path = other_;
    const auto begun = *TrainTiny(graph_, tasks, data_, first);
    TinyRun second = whole;
    second.steps = 4;
    second.load_path = other_;
    std::filesystem::remove(path_);
    const auto resumed = *TrainTiny(graph_, tasks, data_, second);

    EXPECT_EQ(resumed.first_step, 2);
    std::vector<double> losses = begun.losses;
    losses.insert(losses.end(), resumed.losses.begin(), resumed.losses.end());
    EXPECT_EQ(losses, straight.losses);
    EXPECT_EQ(ReadBytes(path_), expected);
  }
}

TEST_F(Checkpoint, LoadsUnderAnyPlan) {
  TinyRun begin;
  begin.steps = 2;
  begin.save_path = path_;
  ASSERT_TRUE(TrainTiny(graph_, Tasks(4, "dp=2,tp=2,zero=1,sp=1"), data_, begin)
                  .has_value());
  TinyRun go_on;
  go_on.steps = 3;
  go_on.load_path = path_;
  const auto expected = *TrainTiny(graph_, Tasks(1, "mbs=4"), data_, go_on);
  const auto actual =
      *TrainTiny(graph_, Tasks(2, "dp=1,pp=2,schedule=gpipe"), data_, go_on);
  ASSERT_EQ(actual.losses.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(actual.losses[i], expected.losses[i], 1e-5) << i;
  }
}

// Under another plan than it was saved by; AdamW's state is none of momentum's.
TEST_F(Checkpoint, HoldsMomentum) {
  TinyRun whole;
  whole.options.optimizer = "momentum";
  whole.options.learning_rate = 0.05;
  whole.steps = 5;
  const auto one = Tasks(1, "mbs=4", whole.options);
  const auto straight = *TrainTiny(graph_, one, data_, whole);
  TinyRun first = whole;
  first.steps = 2;
  first.save_path = path_;
  ASSERT_TRUE(
      TrainTiny(graph_, Tasks(2, "dp=2,zero=1", whole.options), data_, first)
          .has_value());
  TinyRun second = whole;
  second.steps = 3;
  second.load_path = path_;
  const auto resumed = *TrainTiny(graph_, one, data_, second);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(resumed.losses[i], straight.losses[i + 2], 1e-5) << i;
  }
  TinyRun adamw;
  adamw.steps = 1;
  adamw.save_path = path_;
  ASSERT_TRUE(TrainTiny(graph_, Tasks(1, "mbs=4"), data_, adamw).has_value());
  const auto wrong = TrainTiny(graph_, one, data_, second);
  ASSERT_FALSE(wrong.has_value());
  EXPECT_THAT(wrong.error().ToString(),
              ::testing::HasSubstr("of the optimizer 'adamw', whose state is "
                                   "not that of 'momentum'"));
  // Nor is momentum's state dropped where there is none.
  ASSERT_TRUE(TrainTiny(graph_, one, data_, first).has_value());
  TinyRun sgd = second;
  sgd.options.optimizer = "sgd";
  const auto dropped =
      TrainTiny(graph_, Tasks(1, "mbs=4", sgd.options), data_, sgd);
  ASSERT_FALSE(dropped.has_value());
  EXPECT_THAT(dropped.error().ToString(),
              ::testing::HasSubstr("'momentum', whose state is not that of "
                                   "'sgd'"));
}

// Rows and columns are saved whole under plans that cut them, or what they are
// of, and loaded under others.
TEST_F(Checkpoint, HoldsAdafactor) {
  TinyRun whole;
  whole.options.optimizer = "adafactor";
  whole.options.learning_rate = 0.02;
  whole.steps = 6;
  const auto straight =
      *TrainTiny(graph_, Tasks(1, "mbs=4", whole.options), data_, whole);
  for (const auto& [saved, loaded] :
       {std::pair("dp=2,tp=2,zero=1", "pp=2,dp=2,zero=3"),
        std::pair("dp=4,zero=3,offload=optimizer:file", "tp=4"),
        std::pair("dp=2,tiles=3", "dp=2,tp=2,tiles=2,zero=2")}) {
    SCOPED_TRACE(saved);
    TinyRun first = whole;
    first.steps = 3;
    first.save_path = path_;
    const int ranks = std::string_view(saved) == "dp=2,tiles=3" ? 2 : 4;
    ASSERT_TRUE(
        TrainTiny(graph_, Tasks(ranks, saved, whole.options), data_, first)
            .has_value());
    TinyRun second = whole;
    second.steps = 3;
    second.load_path = path_;
    const auto resumed =
        *TrainTiny(graph_, Tasks(4, loaded, whole.options), data_, second);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_NEAR(resumed.losses[i], straight.losses[i + 3], 1e-4) << i;
    }
  }
  const auto file = *SafetensorsFile::Open(path_);
  EXPECT_TRUE(file.Has("optimizer.row.wte.weight"));
  EXPECT_TRUE(file.Has("optimizer.column.h.1.mlp.c_fc.weight"));
  EXPECT_TRUE(file.Has("optimizer.mean.h.1.mlp.c_fc.weight"));
  EXPECT_TRUE(file.Has("optimizer.v.h.1.mlp.c_fc.bias"));
  EXPECT_FALSE(file.Has("optimizer.v.h.1.mlp.c_fc.weight"));
  const Tensor& table =
      *std::ranges::find(graph_.tensors, "wte.weight", &Tensor::name);
  EXPECT_TRUE(
      file.Find({"optimizer.row.wte.weight", DType::kFloat32, {table.shape[0]}})
          .has_value());
  TinyRun adamw;
  adamw.steps = 1;
  adamw.load_path = path_;
  const auto wrong = TrainTiny(graph_, Tasks(1, "mbs=4"), data_, adamw);
  ASSERT_FALSE(wrong.has_value());
  EXPECT_THAT(wrong.error().ToString(),
              ::testing::HasSubstr("of the optimizer 'adafactor', whose state "
                                   "is not that of 'adamw'"));
}

// What the model has no place for is not dropped.
TEST_F(Checkpoint, OfAModelOfMoreLayersIsRefused) {
  TinyRun run;
  run.steps = 1;
  run.save_path = path_;
  ASSERT_TRUE(TrainTiny(graph_, Tasks(1, "mbs=4"), data_, run).has_value());
  const Graph shallow = ImportTiny(TinyGpt2(1, 4), 4, 8, DType::kFloat32);
  TinyRun other;
  other.steps = 1;
  other.load_path = path_;
  const auto loaded =
      TrainTiny(shallow, *LowerStrategy(shallow, 1, "mbs=4", {}), data_, other);
  ASSERT_FALSE(loaded.has_value());
  EXPECT_THAT(
      loaded.error().ToString(),
      ::testing::HasSubstr("is none that the model or its optimizer has"));
}

TEST_F(Checkpoint, HoldsStepSeedAndGraph) {
  TinyRun run;
  run.steps = 3;
  run.save_path = path_;
  ASSERT_TRUE(TrainTiny(graph_, Tasks(2, "dp=2"), data_, run).has_value());
  const auto file = *SafetensorsFile::Open(path_);
  EXPECT_EQ(file.metadata().at("step"), "3");
  EXPECT_EQ(file.metadata().at("seed"), "7");
  EXPECT_EQ(file.metadata().at("optimizer"), "adamw");
  EXPECT_EQ(file.metadata().at("model"), graph_.name);
  EXPECT_EQ(file.metadata().at("graph"), Fingerprint(graph_));
  const auto saved = SavedRunOf(path_);
  ASSERT_TRUE(saved.has_value() && saved->has_value());
  EXPECT_EQ((*saved)->seed, 7u);
  EXPECT_EQ((*saved)->model, graph_.name);
  EXPECT_EQ((*saved)->graph, Fingerprint(graph_));
  EXPECT_FALSE((*saved)->stochastic_rounding);
  EXPECT_TRUE(file.Has("optimizer.m.wte.weight"));
  EXPECT_TRUE(file.Has("optimizer.v.h.1.mlp.c_fc.bias"));
}

// What a file of no tensors says of its run, or the error, or "weights".
std::string SaidBy(
    const std::string& path,
    const std::map<std::string, std::string, std::less<>>& metadata) {
  TESSERA_CHECK(SafetensorsWriter::Create(path, {}, metadata).value().Commit());
  const auto run = SavedRunOf(path);
  if (!run) return run.error().ToString();
  return *run ? "step " + std::to_string((*run)->step) : "weights";
}

TEST_F(Checkpoint, NumbersAreBounded) {
  const std::string most = "9007199254740992";  // 2^53
  const std::string above = "9007199254740993";
  EXPECT_EQ(SaidBy(path_, {{"step", most}}), "step " + most);
  for (const char* const key : {"step", "samples", "global_batch", "seq_len"}) {
    for (const std::string& number : {above, std::string("9223372036854775807"),
                                      std::string("-1"), std::string("six")}) {
      std::map<std::string, std::string, std::less<>> metadata = {
          {"step", "1"}};
      metadata[key] = number;
      EXPECT_EQ(SaidBy(path_, metadata),
                path_ + ": __metadata__: " + key + " '" + number +
                    "': expected a number of at most 2^53");
    }
  }
  SaidBy(path_, {{"step", most}, {"optimizer", "adamw"}});
  TinyRun run;
  run.load_path = path_;
  EXPECT_THAT(
      TrainTiny(graph_, Tasks(1, ""), data_, run).error().ToString(),
      ::testing::HasSubstr("step '" + most +
                           "': expected at most 2^53 samples behind it, 4 a "
                           "step"));
  // A seed is any.
  EXPECT_EQ(SaidBy(path_, {{"step", "1"}, {"seed", "18446744073709551615"}}),
            "step 1");
}

TEST_F(Checkpoint, WithoutAStepIsAnError) {
  EXPECT_EQ(SaidBy(path_, {{"format", "pt"}}), "weights");
  EXPECT_EQ(SaidBy(path_, {{"optimizer", "sgd"}}),
            path_ +
                ": __metadata__: has no step, and the file has more than "
                "weights: expected the 'step' of a checkpoint");
}

TEST_F(Checkpoint, WeightsAloneStartAtStepZero) {
  const TaskGraph tasks = Tasks(2, "dp=2,zero=1");
  TinyRun fresh;
  fresh.steps = 2;
  const auto expected = *TrainTiny(graph_, tasks, data_, fresh);
  // The initial weights, by a run of no steps at learning rate 0.
  TinyRun still = fresh;
  still.steps = 1;
  still.options.learning_rate = 0;
  still.save_path = path_;
  ASSERT_TRUE(TrainTiny(graph_, tasks, data_, still).has_value());
  std::vector<SafetensorsEntry> entries;
  std::vector<std::vector<float>> contents;
  {
    const auto file = *SafetensorsFile::Open(path_);
    for (TensorId id : Weights(graph_)) {
      const Tensor& tensor = graph_.tensor(id);
      entries.push_back({tensor.name, tensor.dtype, tensor.shape});
      const auto values = ReadTensor(file, tensor.name, tensor);
      contents.emplace_back(values.begin(), values.end());
    }
  }
  auto writer = *SafetensorsWriter::Create(other_, entries, {});
  for (const auto& values : contents) {
    ASSERT_TRUE(writer.Write(std::as_bytes(std::span(values))).has_value());
  }
  ASSERT_TRUE(writer.Commit().has_value());
  TinyRun run = fresh;
  run.load_path = other_;
  const auto actual = *TrainTiny(graph_, tasks, data_, run);
  EXPECT_EQ(actual.first_step, 0);
  EXPECT_EQ(actual.losses, expected.losses);
}

TEST_F(Checkpoint, AnotherModelsIsAnError) {
  TinyRun run;
  run.steps = 1;
  run.save_path = path_;
  ASSERT_TRUE(TrainTiny(graph_, Tasks(1, ""), data_, run).has_value());
  const Graph deeper = ImportTiny(TinyGpt2(3, 4), 4, 8, DType::kFloat32);
  const Graph wider = ImportTiny(TinyGpt2(2, 4, 24), 4, 8, DType::kFloat32);
  run.load_path = path_;
  run.save_path = "";
  for (const Graph* graph : {&deeper, &wider}) {
    const TaskGraph tasks = LowerStrategy(*graph, 2, "dp=2", {}).value();
    const auto result = TrainTiny(*graph, tasks, data_, run);
    ASSERT_FALSE(result.has_value());
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidInput);
    EXPECT_NE(result.error().ToString().find(
                  graph == &deeper ? "h.2." : ", 16]: expected F32["),
              std::string::npos)
        << result.error().ToString();
  }
}

TEST_F(Checkpoint, FailedSaveIsAnErrorOnAllRanks) {
  TinyRun run;
  run.steps = 1;
  run.save_path = ::testing::TempDir() + "no/such/folder/checkpoint";
  for (const char* const strategy : {"dp=2", "dp=2,zero=3,tiles=2"}) {
    SCOPED_TRACE(strategy);
    const auto result = TrainTiny(graph_, Tasks(2, strategy), data_, run);
    ASSERT_FALSE(result.has_value());
    // As the folder was there when the run began, it is no bad input.
    EXPECT_EQ(result.error().code, ErrorCode::kUnavailable);
    EXPECT_EQ(result.error().where, run.save_path);
    EXPECT_THAT(
        result.error().message,
        ::testing::HasSubstr("the checkpoint of step 1 is not written"));
  }
}

// A job that ends while rank 0 waits for the disk.
TEST_F(Checkpoint, WhatRanksWaitedForInVainIsNotPutInPlace) {
  const TaskGraph tasks = Tasks(2, "dp=2");
  WriteBytes(path_, "before");
  fsync_seconds = 6;
  const auto errors = ErrorsOfTwoRanks(
      tasks, [&](int, TrainingJob& job) { job.save_path = path_; },
      Duration::FromSeconds(3));
  fsync_seconds = 0;
  for (const std::string& error : errors) {
    EXPECT_THAT(error, ::testing::HasSubstr(
                           "rank 0 (in task 'saving of the checkpoint')"));
  }
  EXPECT_EQ(ReadBytes(path_), "before");
}

// Forwards to another world, and keeps what it was told to be doing.
class TellingWorld : public CommWorld {
 public:
  explicit TellingWorld(CommWorld& inner) : inner_(inner) {}
  int world_rank() const override { return inner_.world_rank(); }
  int world_size() const override { return inner_.world_size(); }
  Result<Communicator*> Group(std::span<const int> ranks) override {
    return inner_.Group(ranks);
  }
  Result<void> Flush() override { return inner_.Flush(); }
  void Abort(std::string_view reason) override { inner_.Abort(reason); }
  void SetCurrentTask(std::string_view task) override {
    told_.emplace_back(task);
    inner_.SetCurrentTask(task);
  }
  const std::vector<std::string>& told() const { return told_; }

 private:
  CommWorld& inner_;
  std::vector<std::string> told_;
};

// So that who waits for a rank can say what that is doing.
TEST_F(Checkpoint, WhatIsNoTaskOfAStepIsNamed) {
  const TaskGraph tasks = Tasks(1, "mbs=4");
  const auto told = [&](const std::string& load) {
    auto worlds = MakeThreadWorlds(1, {Duration::FromSeconds(30)});
    TellingWorld world(*worlds[0]);
    CpuDevice device;
    TrainingJob job;
    job.graph = &graph_;
    job.tasks = &tasks;
    job.world = &world;
    job.device = &device;
    job.load = LoadAtRandom(data_, 0, graph_);
    job.load_path = load;
    job.save_path = path_;
    job.layout.family = "gpt2";
    job.export_folder = other_;
    job.validation = {1, 1, job.load,
                      [](int64_t) -> Result<int64_t> { return 32; }};
    EXPECT_TRUE(Train(job).has_value());
    std::filesystem::remove_all(other_);
    return world.told();
  };
  const std::vector<std::string> first = told("");
  EXPECT_EQ(first[0], "setting of the first weights");
  // Where the next wait is one for ranks that set theirs.
  EXPECT_EQ(first[1], "");
  EXPECT_THAT(first,
              ::testing::IsSupersetOf({"validation", "saving of the checkpoint",
                                       "export of weights"}));
  EXPECT_EQ(told(path_)[0], "loading of the checkpoint");
}

// By each rank that reads it, whatever of it that is.
TEST_F(Checkpoint, DamageIsAnErrorOfWhoReadsIt) {
  TinyRun run;
  run.steps = 1;
  run.save_path = path_;
  ASSERT_TRUE(TrainTiny(graph_, Tasks(1, ""), data_, run).has_value());
  const std::string bytes = ReadBytes(path_);
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  run.save_path = "";
  run.load_path = other_;
  for (const char* strategy : {"dp=2,zero=1", "tp=2", "dp=1,pp=2"}) {
    const TaskGraph tasks = Tasks(2, strategy);
    WriteBytes(other_, bytes);
    EXPECT_TRUE(TrainTiny(graph_, tasks, data_, run).has_value()) << strategy;
    // In the first tensor, somewhere, in the last one.
    for (const size_t at : {8 + length, bytes.size() / 2, bytes.size() - 100}) {
      std::string damaged = bytes;
      damaged[at] ^= 1;
      WriteBytes(other_, damaged);
      const auto result = TrainTiny(graph_, tasks, data_, run);
      ASSERT_FALSE(result.has_value()) << strategy << " " << at;
      EXPECT_THAT(result.error().ToString(),
                  ::testing::HasSubstr("damaged: what is from byte "));
    }
  }
}

// ---- Checkpoints before the newest

class OlderCheckpointsTest : public Checkpoint {
 protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    Checkpoint::TearDown();
  }

  // So many steps behind `load`, each saved.
  Result<TrainingResult> Train(int64_t steps, int keep,
                               const std::string& load = "") {
    TinyRun run;
    run.steps = steps;
    run.save_path = newest_;
    run.save_every = 1;
    run.keep_checkpoints = keep;
    run.load_path = load;
    return TrainTiny(graph_, Tasks(2, "dp=2"), data_, run);
  }

  // What is in the folder, with its step.
  std::map<std::string, std::string> Steps() const {
    std::map<std::string, std::string> steps;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      const auto file = SafetensorsFile::Open(entry.path());
      steps[entry.path().filename()] =
          file ? file->metadata().at("step") : file.error().ToString();
    }
    return steps;
  }

  using Map = std::map<std::string, std::string>;
  const std::string folder_ = TempPath("folder");
  const std::string newest_ = folder_ + "/x";
};

TEST_F(OlderCheckpointsTest, AreTheLast) {
  ASSERT_TRUE(Train(2, 3).has_value());
  EXPECT_EQ(Steps(), (Map{{"x", "2"}, {"x.step-1", "1"}}));
  ASSERT_TRUE(Train(10, 3, newest_).has_value());
  EXPECT_EQ(Steps(),
            (Map{{"x", "12"}, {"x.step-10", "10"}, {"x.step-11", "11"}}));
  // Without the flag they stay.
  ASSERT_TRUE(Train(1, 1, newest_).has_value());
  EXPECT_EQ(Steps(),
            (Map{{"x", "13"}, {"x.step-10", "10"}, {"x.step-11", "11"}}));
  ASSERT_TRUE(Train(1, 2, newest_).has_value());
  EXPECT_EQ(Steps(), (Map{{"x", "14"}, {"x.step-13", "13"}}));
  // A whole checkpoint, as the newest was.
  const auto resumed = *Train(1, 2, newest_ + ".step-13");
  EXPECT_EQ(resumed.first_step, 13);
}

// What lies beyond is of no use to it, and goes first.
TEST_F(OlderCheckpointsTest, OfARunThatWasGoneBackBehind) {
  ASSERT_TRUE(Train(6, 3).has_value());
  EXPECT_EQ(Steps(), (Map{{"x", "6"}, {"x.step-4", "4"}, {"x.step-5", "5"}}));
  ASSERT_TRUE(Train(1, 3, newest_ + ".step-4").has_value());
  EXPECT_EQ(Steps(), (Map{{"x", "5"}, {"x.step-4", "4"}, {"x.step-5", "5"}}));
  const std::string five = ReadBytes(newest_);
  ASSERT_TRUE(Train(1, 3, newest_).has_value());
  EXPECT_EQ(Steps(), (Map{{"x", "6"}, {"x.step-4", "4"}, {"x.step-5", "5"}}));
  EXPECT_EQ(ReadBytes(newest_ + ".step-5"), five);
}

// Where a run that was killed may have stopped: within the making of a second
// name, behind it, or before the oldest was removed.
TEST_F(OlderCheckpointsTest, OfARunThatWasKilled) {
  ASSERT_TRUE(Train(3, 2).has_value());
  std::filesystem::create_hard_link(newest_, newest_ + ".step-3");
  std::filesystem::create_hard_link(newest_ + ".step-2",
                                    newest_ + ".step-1.new");
  EXPECT_EQ(Steps(), (Map{{"x", "3"},
                          {"x.step-1.new", "2"},
                          {"x.step-2", "2"},
                          {"x.step-3", "3"}}));
  ASSERT_TRUE(Train(1, 2, newest_).has_value());
  EXPECT_EQ(Steps(), (Map{{"x", "4"}, {"x.step-3", "3"}}));
}

// Names alone tell which files are a run's own.
TEST_F(OlderCheckpointsTest, AreNoOtherFiles) {
  const std::set<std::string> others = {"x.step-",
                                        "x.step-07",
                                        "x.step--1",
                                        "x.step-1.old",
                                        "x.step-07.new",
                                        "x.step-1.new.new",
                                        "x.new",
                                        "xx.step-1",
                                        "x.tmp.host.1.0",
                                        "x.step-0x1",
                                        "y",
                                        "x.step-1e3",
                                        "x.step-1 (copy)",
                                        "x.step-9999999999999999999"};
  for (const std::string& name : others) WriteBytes(folder_ + "/" + name, "");
  ASSERT_TRUE(Train(4, 2).has_value());
  std::set<std::string> names;
  for (const auto& [name, step] : Steps()) names.insert(name);
  std::set<std::string> expected = others;
  expected.insert({"x", "x.step-3"});
  EXPECT_EQ(names, expected);
  for (const std::string& name : others) {
    EXPECT_FALSE(IsNameOfOlder(newest_, folder_ + "/" + name)) << name;
  }
  // Whether or not they are there, and in this folder alone.
  EXPECT_TRUE(IsNameOfOlder(newest_, folder_ + "/x.step-3"));
  EXPECT_TRUE(IsNameOfOlder(newest_, folder_ + "/./x.step-40"));
  EXPECT_FALSE(IsNameOfOlder(newest_, "x.step-3"));
}

TEST_F(OlderCheckpointsTest, AreBesideWhatALinkLeadsTo) {
  std::filesystem::create_directory(folder_ + "/disk");
  std::filesystem::create_symlink("disk/saved", newest_);
  ASSERT_TRUE(Train(3, 2).has_value());
  EXPECT_TRUE(std::filesystem::is_symlink(newest_));
  EXPECT_TRUE(std::filesystem::exists(folder_ + "/disk/saved.step-2"));
  EXPECT_FALSE(std::filesystem::exists(newest_ + ".step-2"));
}

// No run goes on from them by itself.
TEST_F(OlderCheckpointsTest, AreNamedWhereTheNewestIsDamaged) {
  ASSERT_TRUE(Train(11, 3).has_value());
  const std::string bytes = ReadBytes(newest_);
  const auto error = [&] {
    const auto result = Train(1, 3, newest_);
    return result ? "" : result.error().ToString();
  };
  const std::string older =
      "; an older checkpoint is '" + newest_ + ".step-10'";
  std::string damaged = bytes;
  damaged[bytes.size() / 2] ^= 1;
  WriteBytes(newest_, damaged);
  EXPECT_THAT(error(), ::testing::HasSubstr("has the checksum"));
  EXPECT_THAT(error(), ::testing::EndsWith(older));
  WriteBytes(newest_, bytes.substr(0, bytes.size() / 2));
  EXPECT_THAT(error(), ::testing::HasSubstr("truncated"));
  EXPECT_THAT(error(), ::testing::EndsWith(older));
  WriteBytes(newest_, std::string(bytes.size(), '\0'));
  EXPECT_THAT(error(), ::testing::EndsWith(older));
  // Nor are they lost, nor does what is damaged become one.
  ASSERT_TRUE(Train(1, 3, newest_ + ".step-9").has_value());
  EXPECT_EQ(Steps(),
            (Map{{"x", "10"}, {"x.step-9", "9"}, {"x.step-10", "10"}}));
}

TEST_F(OlderCheckpointsTest, NeedHardLinks) {
  EXPECT_TRUE(CheckCanKeepOlder(newest_).has_value());
  EXPECT_EQ(Steps(), Map());
  // A name that is too long is as good as a file system without links.
  const std::string longest = folder_ + "/" + std::string(240, 'x');
  EXPECT_EQ(CheckCanKeepOlder(longest).error().ToString(),
            longest +
                ": cannot give a file beside it a second name, as a hard "
                "link: File name too long");
  EXPECT_EQ(Steps(), Map());
}

// ---- The training loop

TEST_F(Checkpoint, StopFinishesTheStepAndSaves) {
  std::atomic<bool> stop = false;
  TinyRun run;
  run.steps = 10;
  run.stop = &stop;
  run.progress = [&](const StepReport&) -> Result<void> {
    stop = true;
    return {};
  };
  run.save_path = path_;
  const auto result = *TrainTiny(graph_, Tasks(2, "dp=1,pp=2"), data_, run);
  // The first step's report comes after its end: rank 0 stops with the second.
  EXPECT_TRUE(result.interrupted);
  EXPECT_EQ(result.losses.size(), 2u);
  EXPECT_EQ(SafetensorsFile::Open(path_)->metadata().at("step"), "2");
}

// Copies a checkpoint, with another loss scale.
void CopyWithScale(const std::string& from, const std::string& to,
                   const LossScale& scale) {
  const auto file = SafetensorsFile::Open(from).value();
  std::vector<SafetensorsEntry> entries;
  for (const std::string& name : file.names()) {
    if (name == kChecksums) continue;
    const TensorView view = file.View(name).value();
    entries.push_back({name, view.dtype, view.shape});
  }
  auto writer = SafetensorsWriter::Create(to, entries, file.metadata()).value();
  for (const SafetensorsEntry& entry : entries) {
    const auto bytes =
        ElementsOf(WholeBox(entry.shape)) * int64_t{SizeOf(entry.dtype)};
    const auto* const data = entry.name == "optimizer.loss_scale"
                                 ? reinterpret_cast<const std::byte*>(&scale)
                                 : file.View(entry.name)->data;
    ASSERT_TRUE(writer.Write({data, static_cast<size_t>(bytes)}).has_value());
  }
  ASSERT_TRUE(writer.Commit().has_value());
}

TEST_F(Checkpoint, StepsTellTheLossScale) {
  const Graph graph = ImportTiny(TinyGpt2(2, 4), 4, 8, DType::kFloat16);
  for (const char* strategy : {"dp=2", "pp=2"}) {
    const auto tasks = LowerStrategy(graph, 2, strategy, {}).value();
    TinyRun run;
    run.steps = 1;
    run.save_path = path_;
    const auto first = TrainTiny(graph, tasks, data_, run).value();
    EXPECT_EQ(first.loss_scales, std::vector<double>{65536});
    EXPECT_TRUE(first.skipped_steps.empty());
    // Gradients 2^40 times as large are none of fp16's numbers.
    CopyWithScale(path_, other_, {0x1p40F, 1, 5});
    run.steps = 2;
    run.save_path = "";
    run.load_path = other_;
    std::vector<double> scales;
    run.progress = [&](const StepReport& step) -> Result<void> {
      EXPECT_TRUE(step.skipped);
      scales.push_back(step.loss_scale.value_or(0));
      return {};
    };
    const auto result = TrainTiny(graph, tasks, data_, run).value();
    EXPECT_EQ(result.loss_scales, (std::vector<double>{0x1p40, 0x1p39}));
    EXPECT_EQ(result.skipped_steps, (std::vector<int64_t>{1, 2}));
    EXPECT_EQ(scales, result.loss_scales);
  }
  TinyRun run;
  run.steps = 1;
  const auto single = TrainTiny(graph_, Tasks(2, "dp=2"), data_, run).value();
  EXPECT_TRUE(single.loss_scales.empty());
}

TEST_F(Checkpoint, StopBeforeTheFirstStepTrainsNothing) {
  const TaskGraph tasks = Tasks(2, "dp=1,pp=2");
  TinyRun run;
  run.steps = 1;
  run.save_path = other_;
  ASSERT_TRUE(TrainTiny(graph_, tasks, data_, run).has_value());
  const std::atomic<bool> stop = true;
  run.stop = &stop;
  run.save_path = path_;
  for (const std::string& load : {std::string(), other_}) {
    run.load_path = load;
    const auto result = TrainTiny(graph_, tasks, data_, run);
    ASSERT_FALSE(result.has_value());
    EXPECT_EQ(result.error().code, ErrorCode::kInterrupted);
    EXPECT_FALSE(std::filesystem::exists(path_));
  }
}

// The others learn of it in the next step, unless there is none.
TEST_F(Checkpoint, AnErrorBehindAStepIsAStop) {
  TinyRun run;
  run.save_path = path_;
  int reports = 0;
  run.progress = [&](const StepReport&) -> Result<void> {
    if (++reports < 2) return {};
    return Error{ErrorCode::kUnavailable,
                 "cannot write " + std::to_string(reports), "log"};
  };
  for (const int64_t steps : {10, 2}) {
    run.steps = steps;
    reports = 0;
    const auto result = *TrainTiny(graph_, Tasks(2, "dp=2"), data_, run);
    ASSERT_TRUE(result.untold.has_value());
    EXPECT_EQ(result.untold->ToString(), "log: cannot write 2");
    EXPECT_FALSE(result.interrupted);
    const int64_t last = std::min<int64_t>(3, steps);
    EXPECT_EQ(reports, last);
    EXPECT_EQ(result.saved, last);
    EXPECT_EQ(SafetensorsFile::Open(path_)->metadata().at("step"),
              std::to_string(last));
  }
}

// What the ranks tell each other, read and write does not depend on the device.
// Fused kernels add in another order.
TEST_F(Checkpoint, DeviceWithQueues) {
  const TaskGraph tasks = Tasks(4, "dp=2,pp=2,zero=1");
  TinyRun run;
  run.steps = 3;
  run.save_path = path_;
  const auto expected = *TrainTiny(graph_, tasks, data_, run);
  run.save_path = other_;
  run.fuses = false;
  for (const bool on_loopback : {false, true}) {
    run.in_queues = !on_loopback;
    run.on_loopback = on_loopback;
    const auto result = *TrainTiny(graph_, tasks, data_, run);
    EXPECT_EQ(result.losses, expected.losses);
    EXPECT_EQ(ReadBytes(other_), ReadBytes(path_));
    ASSERT_EQ(result.timelines.size(), 4u);
    for (const Timeline& timeline : result.timelines) {
      for (const Span& span : timeline.spans) {
        EXPECT_LE(span.start, span.end);
        EXPECT_LE(span.end, timeline.step_time);
      }
    }
  }
}

TEST_F(Checkpoint, ReportsEveryRank) {
  TinyRun run;
  run.steps = 4;
  const TaskGraph tasks = Tasks(4, "dp=2,pp=2,zero=1");
  const auto result = *TrainTiny(graph_, tasks, data_, run);
  ASSERT_EQ(result.memory.size(), 4u);
  ASSERT_EQ(result.timelines.size(), 4u);
  EXPECT_EQ(result.step_times.size(), 4u);
  for (size_t r = 0; r < 4; ++r) {
    const MemoryUse& use = result.memory[r];
    Bytes sum;
    for (Bytes part : use.parts) sum += part;
    EXPECT_EQ(sum, use.total);
    EXPECT_GT(use.parts[static_cast<size_t>(MemoryCategory::kParameter)].value,
              0);
    ASSERT_FALSE(result.timelines[r].spans.empty());
    EXPECT_EQ(result.timelines[r].spans[0].rank, static_cast<int>(r));
    EXPECT_EQ(BreakdownOf(tasks, result.timelines[r]).total(),
              result.timelines[r].step_time);
  }
  // Tokens of a step (4 samples of 8) over its time.
  EXPECT_NEAR(result.tokens_per_s, 32 / result.step_time.seconds(), 1e-6);
}

// Ranks that were started apart, with different flags.
// A span has 40 bytes: of 2,000 tasks 65 timelines have 5 MB.
TEST(Timelines, AreFewerOfManyTasks) {
  EXPECT_EQ(KeptTimelines(0), 65u);
  EXPECT_EQ(KeptTimelines(2000), 65u);
  EXPECT_EQ(KeptTimelines(20000), 13u);
  EXPECT_EQ(KeptTimelines(2000000), 9u);
  for (size_t tasks = 1; tasks < 30000; tasks += 7) {
    EXPECT_LE(KeptTimelines(tasks) * tasks * sizeof(Span), 11u << 20) << tasks;
  }
}

TEST_F(Checkpoint, RanksOfDifferentJobsDoNotTrain) {
  const TaskGraph tasks = Tasks(2, "dp=2");
  Graph other_epsilon = graph_;
  const auto norm = std::ranges::find_if(
      other_epsilon.nodes,
      [](const Node& node) { return node.op->name == "layer_norm"; });
  ASSERT_NE(norm, other_epsilon.nodes.end());
  ASSERT_FALSE(norm->attributes.empty());
  norm->attributes[0].value *= 2;
  TaskGraph zigzag = tasks;
  zigzag.zigzag = 2;
  TaskGraph other_devices = tasks;
  for (DeviceGroup& group : other_devices.groups) {
    std::ranges::reverse(group.devices);
  }
  struct Case {
    std::string what;
    std::function<void(TrainingJob&)> change;
  };
  const std::vector<Case> cases = {
      {"seed (--seed)", [](TrainingJob& job) { job.seed = 7; }},
      {"number of steps (--steps)", [](TrainingJob& job) { job.steps = 2; }},
      {"optimizer (--optimizer)",
       [](TrainingJob& job) { job.options.optimizer = "sgd"; }},
      {"clipping, weight decay, betas or epsilon (--clip, --weight-decay, "
       "--betas, --epsilon)",
       [](TrainingJob& job) { job.options.clip = 2; }},
      {"clipping, weight decay, betas or epsilon (--clip, --weight-decay, "
       "--betas, --epsilon)",
       [](TrainingJob& job) { job.options.beta2 = 0.999; }},
      {"rounding (--stochastic-rounding)",
       [](TrainingJob& job) { job.options.stochastic_rounding = true; }},
      {"model or plan", [&](TrainingJob& job) { job.graph = &other_epsilon; }},
      {"model or plan", [&](TrainingJob& job) { job.tasks = &zigzag; }},
      {"model or plan", [&](TrainingJob& job) { job.tasks = &other_devices; }},
      {"learning rate (--lr, --warmup, --decay, --min-lr, --decay-steps)",
       [](TrainingJob& job) { job.learning_rate->warmup = 3; }},
      {"learning rate (--lr, --warmup, --decay, --min-lr, --decay-steps)",
       [](TrainingJob& job) { job.learning_rate->decay = &Decays()[1]; }},
      {"data (--data, --end-of-text, --mask-token)",
       [](TrainingJob& job) { job.data = 1; }},
      {"validation (--validate-every, --validate-batches)",
       [](TrainingJob& job) { job.validation.every = 1; }},
      {"interval, number or file of checkpoints (--save, --save-every, "
       "--keep-checkpoints)",
       [](TrainingJob& job) { job.save_every = 1; }},
      {"interval, number or file of checkpoints (--save, --save-every, "
       "--keep-checkpoints)",
       [](TrainingJob& job) { job.keep_checkpoints = 2; }},
      {"export (--export, --export-shard)",
       [](TrainingJob& job) { job.export_folder = "x"; }},
      {"start (--load)", [](TrainingJob& job) { job.load_path = "x"; }},
      {"GPU, cuBLASLt or use of --tune",
       [](TrainingJob& job) { job.tune = true; }},
      {"use of graphs (--graph)", [](TrainingJob& job) { job.graphs = true; }},
      {"kernels (--deterministic, --compare, --learn, --trace, --profile)",
       [](TrainingJob& job) { job.fuses = false; }},
      {"kernels (--deterministic, --compare, --learn, --trace, --profile)",
       [](TrainingJob& job) { job.deterministic = false; }},
  };
  for (const Case& test : cases) {
    const auto errors =
        ErrorsOfTwoRanks(tasks, [&](int rank, TrainingJob& job) {
          if (rank == 1) test.change(job);
        });
    for (const std::string& error : errors) {
      EXPECT_EQ(error, "rank 1 was started with another " + test.what +
                           " than rank 0");
    }
  }
}

// What a run makes of the step of its checkpoint (--until, the learning rate)
// is of the file that it has looked at before.
TEST_F(Checkpoint, OneThatIsReplacedMeanwhileIsAnError) {
  const TaskGraph tasks = Tasks(2, "dp=2");
  TinyRun run;
  run.steps = 2;
  run.save_path = path_;
  ASSERT_TRUE(TrainTiny(graph_, tasks, data_, run));
  for (const int64_t step : {1, 2}) {
    const auto errors = ErrorsOfTwoRanks(tasks, [&](int, TrainingJob& job) {
      job.load_path = path_;
      job.load_step = step;
    });
    for (const std::string& error : errors) {
      EXPECT_EQ(error, step == 2 ? ""
                                 : path_ +
                                       ": is of step 2 now, and was of step 1 "
                                       "when this run began: another run has "
                                       "replaced it");
    }
  }
}

// Each host reads its own copy of a checkpoint: an old one on one of them is
// seen.
TEST_F(Checkpoint, RanksDoNotGoOnFromDifferentSteps) {
  const TaskGraph tasks = Tasks(2, "dp=2");
  const std::string paths[] = {path_, other_};
  for (int steps : {1, 2}) {
    TinyRun run;
    run.steps = steps;
    run.save_path = paths[steps - 1];
    ASSERT_TRUE(TrainTiny(graph_, tasks, data_, run));
  }
  const auto errors = ErrorsOfTwoRanks(
      tasks, [&](int rank, TrainingJob& job) { job.load_path = paths[rank]; });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("rank 1 begins behind step 2 and rank 0 behind step "
                         "1: they have read different checkpoints"),
              std::string::npos)
        << error;
  }
}

// The error of one rank ends the job: the other does not wait for it.
TEST_F(Checkpoint, BrokenDataEndsTheJob) {
  const TaskGraph tasks = Tasks(2, "dp=1,pp=2");
  const auto errors = ErrorsOfTwoRanks(tasks, [&](int, TrainingJob& job) {
    job.load = [&](const Tensor& tensor, const LocalTensor& block,
                   int64_t step) -> Result<void> {
      if (tensor.name == "tokens") return InvalidInput("is broken", "tokens");
      return LoadAtRandom(data_, 0, graph_)(tensor, block, step);
    };
  });
  // Only the first stage reads the tokens.
  EXPECT_EQ(errors[0], "load input tokens mb0: tokens: is broken");
  EXPECT_NE(errors[1].find("rank 0 aborted: load input tokens"),
            std::string::npos)
      << errors[1];
}

}  // namespace
}  // namespace tessera

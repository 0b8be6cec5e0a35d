// The rows of a run, and training on them: resumed, validated, of documents.

#include "runtime/data/batches.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <set>

#include "tests/support/tiny_training.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

TokenData TokensOf(const std::vector<uint16_t>& ids) {
  const std::string path = TempPath("ids.bin");
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(ids.data()),
             static_cast<std::streamsize>(2 * ids.size()));
  auto data = OpenTokens(path, kTinyVocabulary);
  std::remove(path.c_str());
  return std::move(data).value();
}

// 26 tokens are 5 rows of 5, each with its label; one batch of 2 is held out.
TEST(BatchesTest, AnEpochHasEveryRowOnceButThoseHeldOut) {
  std::vector<uint16_t> ids;
  for (uint16_t i = 0; i < 26; ++i) ids.push_back(i);
  const TokenData data = TokensOf(ids);
  const Batches batches =
      Batches::Make(data,
                    {.seq_len = 5, .global_batch = 2, .validation_batches = 1})
          .value();
  ASSERT_EQ(batches.rows(), 3);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::set<int32_t> starts;
    for (int64_t i = 0; i < 3; ++i) {
      const BatchRow row = batches.TrainingRow(3 * epoch + i).value();
      starts.insert(row.tokens[0]);
      EXPECT_EQ(row.labels[4], row.tokens[4] + 1);
      EXPECT_THAT(row.positions, ElementsAre(0, 1, 2, 3, 4));
    }
    EXPECT_EQ(starts, (std::set<int32_t>{0, 5, 10}));
  }
  EXPECT_EQ(batches.ValidationRow(0)->tokens[0], 15);
  EXPECT_EQ(batches.ValidationRow(1)->tokens[0], 20);
  EXPECT_EQ(batches.ValidationLabels(0).value(), 10);
  const auto short_data = Batches::Make(
      data, {.seq_len = 5, .global_batch = 5, .validation_batches = 1});
  ASSERT_FALSE(short_data.has_value());
  EXPECT_THAT(short_data.error().ToString(),
              ::testing::HasSubstr("5 rows held out need at least 31"));
  const auto no_row = Batches::Make(data, {.seq_len = 26, .global_batch = 1});
  ASSERT_FALSE(no_row.has_value());
  EXPECT_THAT(no_row.error().ToString(),
              ::testing::HasSubstr("holds 26 tokens: a sequence length of 26 "
                                   "needs at least 27"));
  const auto one_token =
      Batches::Make(TokensOf({7}), {.seq_len = 5, .global_batch = 1});
  ASSERT_FALSE(one_token.has_value());
  EXPECT_THAT(one_token.error().ToString(),
              ::testing::HasSubstr("holds 1 token: a sequence length of 5 "
                                   "needs at least 6"));
}

// Rows of 3 tokens of source and 4 of target; 0 ends a document.
TEST(BatchesTest, SourceAndTargetArePaddedBehindADocument) {
  const TokenData data =
      TokensOf({7, 8, 9, 4, 0, 5, 6, 0, 2, 3, 4, 5, 6, 7, 1});
  BatchOptions options = {.seq_len = 4, .global_batch = 1, .end_of_text = 0};
  options.kind = RowKind::kSequenceToSequence;
  options.source_len = 3;
  const Batches batches = Batches::Make(data, options).value();
  ASSERT_EQ(batches.rows(), 2);
  BatchRow first = batches.TrainingRow(0).value();
  BatchRow second = batches.TrainingRow(1).value();
  if (first.source[0] != 7) std::swap(first, second);
  EXPECT_THAT(first.source, ElementsAre(7, 8, 9));
  EXPECT_THAT(first.source_positions, ElementsAre(0, 1, 2));
  EXPECT_THAT(first.tokens, ElementsAre(0, 4, 0, 5));
  EXPECT_THAT(first.labels, ElementsAre(4, 0, -1, -1));
  EXPECT_THAT(first.positions, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(second.source, ElementsAre(0, 2, 3));
  EXPECT_THAT(second.source_positions, ElementsAre(0, -1, -1));
  EXPECT_THAT(second.tokens, ElementsAre(0, 4, 5, 6));
  EXPECT_THAT(second.labels, ElementsAre(4, 5, 6, 7));
}

// What ranks that were started apart compare.
TEST(BatchesTest, FingerprintsTellDataAndHowItIsRead) {
  const TokenData data = TokensOf({7, 8, 0, 4, 0, 5, 6, 9, 9});
  const TokenData other = TokensOf({7, 8, 0, 4, 0, 5, 6, 9, 8});
  const BatchOptions options = {.seq_len = 2, .global_batch = 1};
  BatchOptions documents = options;
  documents.end_of_text = 0;
  BatchOptions masked = options;
  masked.mask_token = 5;
  std::set<uint64_t> prints;
  for (const BatchOptions& read : {options, documents, masked}) {
    for (const TokenData* from : {&data, &other}) {
      const auto print = Batches::Make(*from, read).value().Fingerprint();
      EXPECT_EQ(print, Batches::Make(*from, read).value().Fingerprint());
      prints.insert(print);
    }
  }
  EXPECT_EQ(prints.size(), 6u);
}

// A token says its place in the file, modulo the vocabulary.
TEST(BatchesTest, MaskedTokensOfTwoSegments) {
  constexpr int64_t kRows = 40;
  constexpr int64_t kLength = 101;
  std::vector<uint16_t> ids;
  for (int64_t i = 0; i <= kRows * kLength; ++i) {
    ids.push_back(static_cast<uint16_t>(i % kTinyVocabulary));
  }
  const TokenData data = TokensOf(ids);
  BatchOptions options = {.seq_len = kLength, .global_batch = 1, .seed = 3};
  options.kind = RowKind::kMaskedToken;
  options.mask_token = kTinyVocabulary - 1;
  options.vocabulary = kTinyVocabulary;
  const Batches batches = Batches::Make(data, options).value();
  int64_t labelled = 0;
  int64_t masked = 0;
  int64_t others = 0;
  for (int64_t sample = 0; sample < 10 * kRows; ++sample) {
    const BatchRow row = batches.TrainingRow(sample).value();
    ASSERT_EQ(row.next_sentence.size(), 1u);
    EXPECT_EQ(row.segments[50], 0);
    EXPECT_EQ(row.segments[51], 1);
    // Unlabelled places follow one another in the file, but for the segments of
    // two rows.
    const auto start = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto at = static_cast<size_t>(i);
        if (row.labels[at] >= 0) continue;
        return (row.tokens[at] + kTinyVocabulary * 100 - i) % kTinyVocabulary;
      }
      return int64_t{-1};
    };
    if (row.next_sentence[0] == 0) {
      EXPECT_EQ(start(0, 51), start(51, kLength)) << sample;
    }
    others += row.next_sentence[0];
    for (size_t i = 0; i < row.tokens.size(); ++i) {
      if (row.labels[i] < 0) continue;
      ++labelled;
      masked += row.tokens[i] == options.mask_token ? 1 : 0;
    }
  }
  // Of 40400 places 15 %, 6060, with a deviation of 72; of these 80 %, and of
  // the rest some by chance; of 400 samples half, with a deviation of 10.
  EXPECT_NEAR(static_cast<double>(labelled), 6060, 400);
  EXPECT_NEAR(static_cast<double>(masked) / static_cast<double>(labelled), 0.8,
              0.04);
  EXPECT_NEAR(static_cast<double>(others), 200, 50);
}

TEST(BatchesTest, DocumentsHavePositionsOfTheirOwn) {
  const TokenData data = TokensOf({7, 8, 0, 4, 0, 5, 6, 9, 9});
  const Batches batches =
      Batches::Make(data, {.seq_len = 8, .global_batch = 1, .end_of_text = 0})
          .value();
  const BatchRow row = batches.TrainingRow(0).value();
  EXPECT_THAT(row.tokens, ElementsAre(7, 8, 0, 4, 0, 5, 6, 9));
  EXPECT_THAT(row.labels, ElementsAre(8, 0, -1, 0, -1, 6, 9, 9));
  EXPECT_THAT(row.positions, ElementsAre(0, 1, 2, 0, 1, 0, 1, 2));
  EXPECT_THAT(row.mask_positions, ElementsAre(0, 1, 2, 16, 17, 32, 33, 34));
}

// ---- Training

Graph ImportTinyDocuments(int64_t batch, int64_t seq_len) {
  const std::string folder = TempPath("model");
  std::filesystem::create_directories(folder);
  std::ofstream(folder + "/config.json") << TinyLlama(2);
  auto forward = ImportModel(folder, {.global_batch = batch,
                                      .seq_len = seq_len,
                                      .dtype = DType::kFloat64,
                                      .documents = true});
  std::filesystem::remove_all(folder);
  return Differentiate(std::move(forward).value()).value();
}

double FirstLoss(const Graph& graph, const std::string& strategy, int ranks,
                 const TokenData& data, int64_t end_of_text) {
  const Batches batches = Batches::Make(data, {.seq_len = graph.seq_len,
                                               .global_batch = 1,
                                               .end_of_text = end_of_text})
                              .value();
  TinyRun run;
  run.steps = 1;
  run.batches = &batches;
  const TaskGraph tasks =
      LowerStrategy(graph, ranks, strategy, run.options).value();
  return TrainTiny(graph, tasks, data, run)->losses[0];
}

// A row of three documents, of 3, 2 and 3 tokens with 2, 1 and 3 labels, has
// the loss of the three in rows of their own: the mean over all labels. Each
// file holds one row and the label behind it, so that there is no choice.
TEST(DocumentsTest, APackedRowIsItsDocuments) {
  const TokenData packed = TokensOf({7, 8, 0, 4, 0, 5, 6, 9, 9});
  const double loss =
      FirstLoss(ImportTinyDocuments(1, 8), "dp=1", 1, packed, 0);
  double sum = 0;
  const auto add = [&](const std::vector<uint16_t>& ids, int labels) {
    const auto n = static_cast<int64_t>(ids.size()) - 1;
    sum += labels *
           FirstLoss(ImportTinyDocuments(1, n), "dp=1", 1, TokensOf(ids), 0);
  };
  add({7, 8, 0, 4}, 2);
  add({4, 0, 5}, 1);
  add({5, 6, 9, 9}, 3);
  EXPECT_NEAR(loss, sum / 6, 1e-12);
  // Control: without documents all eight labels count, and all keys are seen.
  EXPECT_GT(std::abs(loss - FirstLoss(ImportTinyDocuments(1, 8), "dp=1", 1,
                                      packed, -1)),
            1e-3);
  // Split over heads and over the sequence.
  EXPECT_NEAR(FirstLoss(ImportTinyDocuments(1, 8), "dp=1,tp=2", 2, packed, 0),
              loss, 1e-12);
  EXPECT_NEAR(FirstLoss(ImportTinyDocuments(1, 8), "dp=1,cp=2", 2, packed, 0),
              loss, 1e-12);
}

class ResumeTest : public ::testing::Test {
 protected:
  // 89 tokens are 11 rows of 8, of which 3 are held out: the first epoch of 8
  // ends within the third step of 3.
  ResumeTest() {
    std::vector<uint16_t> ids;
    for (uint64_t i = 0; i < 89; ++i) {
      ids.push_back(static_cast<uint16_t>(Mix64(i) % kTinyVocabulary));
    }
    data_.emplace(TokensOf(ids));
    batches_.emplace(Batches::Make(*data_, {.seq_len = 8,
                                            .global_batch = 3,
                                            .seed = 7,
                                            .validation_batches = 1})
                         .value());
    run_.batches = &*batches_;
    run_.validate_every = 2;
    run_.learning_rate = {.decay = FindDecay("cosine").value(),
                          .peak = 0.01,
                          .least = 0.001,
                          .warmup = 3,
                          .steps = 10};
  }
  ~ResumeTest() override { std::remove(path_.c_str()); }

  Graph graph_ = ImportTiny(TinyGpt2(2, 4), 3, 8, DType::kFloat32);
  std::optional<TokenData> data_;
  std::optional<Batches> batches_;
  TinyRun run_;
  const std::string path_ = TempPath("checkpoint");
};

// Ten steps of three samples over epochs of eight, with dropout: bit for bit
// those of five steps and five more.
TEST_F(ResumeTest, GoesOnAsIfItHadNotStopped) {
  ASSERT_EQ(batches_->rows(), 8);
  const TaskGraph tasks =
      LowerStrategy(graph_, 3, "dp=3,zero=1", run_.options).value();
  run_.steps = 10;
  const auto whole = TrainTiny(graph_, tasks, *data_, run_).value();
  run_.steps = 5;
  run_.save_path = path_;
  const auto first = TrainTiny(graph_, tasks, *data_, run_).value();
  run_.save_path = "";
  run_.load_path = path_;
  const auto second = TrainTiny(graph_, tasks, *data_, run_).value();
  EXPECT_EQ(second.first_step, 5);
  std::vector<double> losses = first.losses;
  losses.insert(losses.end(), second.losses.begin(), second.losses.end());
  EXPECT_EQ(losses, whole.losses);
  EXPECT_EQ(second.validation_loss, whole.validation_loss);
  EXPECT_NE(second.validation_loss, first.validation_loss);
}

// Validation changes nothing of the training and no memory, and is the same
// under every plan.
TEST_F(ResumeTest, ValidationOnlyLooks) {
  run_.steps = 4;
  const auto validated = [&](const std::string& strategy, int ranks) {
    return TrainTiny(
               graph_,
               LowerStrategy(graph_, ranks, strategy, run_.options).value(),
               *data_, run_)
        .value();
  };
  const auto one = validated("dp=1", 1);
  ASSERT_TRUE(one.validation_loss.has_value());
  for (const char* strategy : {"dp=3,zero=3", "dp=1,tp=2", "dp=1,pp=2"}) {
    const int ranks = strategy[3] == '3' ? 3 : 2;
    EXPECT_NEAR(*validated(strategy, ranks).validation_loss,
                *one.validation_loss, 1e-5)
        << strategy;
  }
  run_.validate_every = 0;
  const auto plain = validated("dp=1", 1);
  EXPECT_EQ(plain.losses, one.losses);
  // The loss of the validation, a number, is kept beside that of training.
  EXPECT_LE(one.memory[0].total.value - plain.memory[0].total.value, 8);
  EXPECT_FALSE(plain.validation_loss.has_value());
}

// They are the same each time.
TEST_F(ResumeTest, LabelsOfValidationAreCountedOnce) {
  const TaskGraph tasks = LowerStrategy(graph_, 1, "dp=1", {}).value();
  const auto worlds = MakeThreadWorlds(1, {});
  CpuDevice device;
  int counted = 0;
  int validated = 0;
  TrainingJob job;
  job.graph = &graph_;
  job.tasks = &tasks;
  job.steps = 6;
  job.load = LoadTraining(*batches_);
  job.world = worlds[0].get();
  job.device = &device;
  job.validation = {2, 1, LoadValidation(*batches_), [&](int64_t batch) {
                      ++counted;
                      return batches_->ValidationLabels(batch);
                    }};
  job.progress = [&](const StepReport& report) -> Result<void> {
    validated += report.validation_loss.has_value() ? 1 : 0;
    return {};
  };
  ASSERT_TRUE(Train(job));
  EXPECT_EQ(validated, 3);
  EXPECT_EQ(counted, 1);
}

}  // namespace
}  // namespace tessera

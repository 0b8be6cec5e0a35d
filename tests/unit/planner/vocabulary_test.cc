// Padded vocabularies: rows, attributes, which weights have padding.

#include "planner/ir/vocabulary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <set>

#include "planner/io/graph_io.h"
#include "planner/io/importer.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

Result<Graph> Import(const std::string& model,
                     const std::map<std::string, std::string>& keys) {
  ImportOptions options;
  options.global_batch = 2;
  options.seq_len = 8;
  for (const auto& [key, text] : keys) {
    const JsonValue parsed = ParseJson("{\"value\": " + text + "}").value();
    options.overrides[key] = parsed.Field("value");
  }
  return ImportModel(model, options);
}

// The padded weights by name, with their rows and how many of these are tokens.
std::map<std::string, std::pair<int64_t, int64_t>> PaddedByName(
    const Graph& graph) {
  std::map<std::string, std::pair<int64_t, int64_t>> padded;
  for (const auto& [weight, tokens] : PaddedWeights(graph)) {
    const Tensor& tensor = graph.tensor(weight);
    padded[tensor.name] = {tensor.shape[0], tokens};
  }
  return padded;
}

// By operator, of the nodes that have the attribute.
std::multiset<std::string> NodesWithVocabulary(const Graph& graph,
                                               double tokens) {
  std::multiset<std::string> ops;
  for (const Node& node : graph.nodes) {
    for (const Attribute& attribute : node.attributes) {
      if (attribute == Attribute{"vocabulary", tokens}) {
        ops.emplace(node.op->name);
      }
    }
  }
  return ops;
}

// 50257 tokens; the next multiple of 128 is 393 * 128 = 50304.
TEST(Vocabulary, RowsAreTheNextMultiple) {
  const Graph graph =
      Import("zoo:gpt2", {{"vocab_multiple", "128"}, {"n_layer", "1"}}).value();
  EXPECT_THAT(Validate(graph), IsEmpty());
  // The head is the table.
  EXPECT_THAT(PaddedByName(graph),
              ElementsAre(Pair("wte.weight", Pair(50304, 50257))));
  EXPECT_THAT(NodesWithVocabulary(graph, 50257),
              UnorderedElementsAre("embedding", "cross_entropy"));
  // The loss's gradient leaves them out too.
  EXPECT_EQ(NodesWithVocabulary(Differentiate(graph).value(), 50257)
                .count("cross_entropy_dx"),
            1u);
}

// Without the key, with 1, and where the vocabulary is a multiple already.
TEST(Vocabulary, NoPaddingIsAsIfThereWereNoKey) {
  const Graph graph = Import("zoo:gpt2-tiny", {}).value();
  EXPECT_THAT(PaddedWeights(graph), IsEmpty());
  for (const char* multiple : {"1", "256"}) {
    EXPECT_EQ(
        Fingerprint(Import("zoo:gpt2-tiny", {{"vocab_multiple", multiple},
                                             {"vocab_size", "256"}})
                        .value()),
        Fingerprint(Import("zoo:gpt2-tiny", {{"vocab_size", "256"}}).value()))
        << multiple;
  }
}

// A prime number of tokens, in rows of a multiple of 16: 101 and 112.
TEST(Vocabulary, EveryFamilyOfTextHasIt) {
  struct Row {
    const char* model;
    std::vector<std::string> weights;
  };
  const std::vector<Row> rows = {
      {"zoo:gpt2-tiny", {"wte.weight"}},
      {"zoo:llama-2-7b", {"lm_head.weight", "model.embed_tokens.weight"}},
      {"zoo:qwen2-7b", {"lm_head.weight", "model.embed_tokens.weight"}},
      {"zoo:mistral-7b", {"lm_head.weight", "model.embed_tokens.weight"}},
      {"zoo:gemma-2b", {"model.embed_tokens.weight"}},
      {"zoo:gemma-2-2b", {"model.embed_tokens.weight"}},
      {"zoo:granite-3.1-2b", {"model.embed_tokens.weight"}},
      {"zoo:phi-2",
       {"lm_head.bias", "lm_head.weight", "model.embed_tokens.weight"}},
      {"zoo:gpt-j-6b",
       {"lm_head.bias", "lm_head.weight", "transformer.wte.weight"}},
      {"zoo:falcon-7b", {"transformer.word_embeddings.weight"}},
      {"zoo:phi-3-mini", {"lm_head.weight", "model.embed_tokens.weight"}},
      {"zoo:deepseek-tiny", {"lm_head.weight", "model.embed_tokens.weight"}},
      {"zoo:opt-125m", {"model.decoder.embed_tokens.weight"}},
      {"zoo:bloom-560m", {"transformer.word_embeddings.weight"}},
      {"zoo:pythia-1b", {"embed_out.weight", "gpt_neox.embed_in.weight"}},
      {"zoo:bert-tiny",
       {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"}},
      {"zoo:t5-tiny", {"shared.weight"}},
      {"zoo:rnn-tiny", {"embed.weight", "head.bias", "head.weight"}},
      {"zoo:nmt-tiny",
       {"embed.source.weight", "embed.target.weight", "head.bias",
        "head.weight"}},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.model);
    const auto graph =
        Import(row.model, {{"vocab_size", "101"}, {"vocab_multiple", "16"}});
    ASSERT_TRUE(graph.has_value()) << graph.error().ToString();
    std::map<std::string, std::pair<int64_t, int64_t>> expected;
    for (const std::string& weight : row.weights) expected[weight] = {112, 101};
    EXPECT_EQ(PaddedByName(*graph), expected);
    EXPECT_EQ(NodesWithVocabulary(*graph, 101).count("cross_entropy"), 1u);
  }
}

// Labels are no tokens: their head has as many rows as there are labels.
TEST(Vocabulary, AHeadOfLabelsIsNotPadded) {
  const Graph graph =
      Import("zoo:gpt2-tiny",
             {{"vocab_size", "101"},
              {"vocab_multiple", "16"},
              {"num_labels", "3"},
              {"architectures", R"(["GPT2ForSequenceClassification"])"}})
          .value();
  EXPECT_THAT(PaddedByName(graph),
              ElementsAre(Pair("wte.weight", Pair(112, 101))));
  EXPECT_THAT(NodesWithVocabulary(graph, 101),
              UnorderedElementsAre("embedding"));
}

TEST(Vocabulary, MultiplesThatAreNoneAreErrors) {
  for (const char* multiple : {"0", "-8", "1.5", "\"8\"", "1048577"}) {
    const auto graph = Import("zoo:gpt2-tiny", {{"vocab_multiple", multiple}});
    ASSERT_FALSE(graph.has_value()) << multiple;
    EXPECT_THAT(graph.error().ToString(),
                AllOf(HasSubstr("vocab_multiple: is "),
                      HasSubstr("expected a whole number from 1 to")));
  }
  // A model of images has no vocabulary.
  const auto images = Import("zoo:vit-tiny", {{"vocab_multiple", "8"}});
  ASSERT_FALSE(images.has_value());
  EXPECT_THAT(images.error().ToString(), HasSubstr("vocab_multiple"));
}

// A tiny model as a graph file, which an edit may spoil.
class VocabularyFileTest : public ::testing::Test {
 protected:
  const std::string path_ = TempPath("padded.txtpb");
  Graph graph_ =
      Import("zoo:gpt2-tiny", {{"vocab_size", "101"}, {"vocab_multiple", "16"}})
          .value();

  void TearDown() override { std::remove(path_.c_str()); }
  // The error of reading it with the loss's attribute once for each of
  // `tokens`.
  std::string ErrorWith(const std::vector<double>& tokens) {
    for (Node& node : graph_.nodes) {
      if (node.op->name != "cross_entropy") continue;
      node.attributes.clear();
      for (double value : tokens) {
        node.attributes.push_back({"vocabulary", value});
      }
    }
    EXPECT_TRUE(WriteGraph(path_, graph_).has_value());
    const auto read = ReadGraph(path_);
    return read ? "" : read.error().ToString();
  }
};

TEST_F(VocabularyFileTest, AGraphFileKeepsIt) {
  ASSERT_TRUE(WriteGraph(path_, graph_).has_value());
  EXPECT_EQ(ReadGraph(path_).value(), graph_);
}

TEST_F(VocabularyFileTest, WrongNumbersOfTokensAreErrors) {
  EXPECT_EQ(ErrorWith({101}), "");
  EXPECT_EQ(ErrorWith({112}), "");
  EXPECT_THAT(ErrorWith({113}),
              HasSubstr("'vocabulary' is 113: expected at most the 112 rows"));
  EXPECT_THAT(ErrorWith({0}), HasSubstr("'vocabulary' is 0: expected a whole "
                                        "number of at least 1"));
  EXPECT_THAT(ErrorWith({100.5}), HasSubstr("expected a whole number"));
  EXPECT_THAT(ErrorWith({101, 101}), HasSubstr("'vocabulary' occurs twice"));
}

}  // namespace
}  // namespace tessera

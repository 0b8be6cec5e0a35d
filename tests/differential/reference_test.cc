// Serial training against an independent NumPy program:
// tests/testdata/reference/training_reference.py.

#include <cmath>
#include <cstdio>

#include "planner/io/json_value.h"
#include "tests/support/paths.h"
#include "tests/support/tiny_training.h"

namespace tessera {
namespace {

class Reference : public ::testing::TestWithParam<const char*> {};

TEST_P(Reference, LossesAndWeightsAgree) {
  const JsonValue reference =
      ReadJson(TestdataPath(std::string("reference/") + GetParam() + ".json"))
          .value();
  const auto number = [&](const char* key) {
    return reference.Field(key).number;
  };
  const JsonValue& options = reference.Field("options");
  TinyRun run;
  run.options.learning_rate = options.Field("learning_rate").number;
  run.options.clip = options.Field("clip").number;
  run.options.beta1 = options.Field("beta1").number;
  run.options.beta2 = options.Field("beta2").number;
  run.options.epsilon = options.Field("epsilon").number;
  run.options.weight_decay = options.Field("weight_decay").number;
  run.seed = static_cast<uint64_t>(number("seed"));
  run.steps = static_cast<int64_t>(reference.Field("losses").items.size());
  run.save_path = TempPath("weights.safetensors");

  const Graph graph = ImportTiny(reference.Field("config").ToString(),
                                 static_cast<int64_t>(number("batch")),
                                 static_cast<int64_t>(number("seq_len")));
  const TaskGraph tasks =
      LowerStrategy(graph, 1, "dp=1,mbs=2", run.options).value();
  const TokenData data = TinyTokens();
  const TrainingResult result = TrainTiny(graph, tasks, data, run).value();

  ASSERT_GE(result.losses.size(), 5u);
  for (size_t i = 0; i < result.losses.size(); ++i) {
    EXPECT_NEAR(result.losses[i], reference.Field("losses").items[i].number,
                1e-9)
        << "step " << i;
    // Clipping took part.
    EXPECT_GT(reference.Field("gradient_norms").items[i].number,
              run.options.clip);
  }
  const auto file = SafetensorsFile::Open(run.save_path).value();
  for (TensorId id : Weights(graph)) {
    const Tensor& tensor = graph.tensor(id);
    double square = 0;
    for (double value : ReadTensor(file, tensor.name, tensor)) {
      square += value * value;
    }
    const double expected =
        reference.Field("weight_norms").Field(tensor.name).number;
    // A key's bias has no gradient: what it holds is rounding.
    EXPECT_NEAR(std::sqrt(square), expected, 1e-9 * expected + 1e-10)
        << tensor.name;
  }
  std::remove(run.save_path.c_str());
}

INSTANTIATE_TEST_SUITE_P(Models, Reference, ::testing::Values("gpt2", "llama"));

}  // namespace
}  // namespace tessera

#include "planner/io/model_head.h"

#include <algorithm>
#include <array>

#include "planner/base/table.h"

namespace tessera {
namespace {

// What "problem_type" may be, and the loss that it stands for.
struct Problem {
  std::string_view name;
  std::string_view loss;
};
constexpr std::array kProblems = {
    Problem{"single_label_classification", "cross_entropy"},
    Problem{"multi_label_classification", "binary_cross_entropy"},
    Problem{"regression", "mean_squared_error"},
};

const LossRow* LossNamed(std::string_view name) {
  return *Find("loss", Losses(), name);
}

const LossRow* ReadLoss(ModelConfig& config, int64_t labels) {
  const std::string type = config.String(
      "problem_type", labels == 1 ? kProblems[2].name : kProblems[0].name);
  const auto problem =
      Find("problem type", std::span<const Problem>(kProblems), type);
  if (problem) return LossNamed((*problem)->loss);
  config.Wrong("problem_type", problem.error().message);
  return LossNamed(kProblems[0].loss);
}

void Warn(const ModelConfig& config, const ImportOptions& options,
          const std::string& message) {
  if (options.warnings == nullptr) return;
  options.warnings->push_back(config.path() + ": architectures: " + message);
}

}  // namespace

std::vector<HeadClass> DecoderClasses(const std::string& family,
                                      const std::string& own,
                                      const std::string& token_module,
                                      double token_dropout) {
  return {
      {.name = family + own},
      {.name = family + "Model", .kind = HeadKind::kNone},
      {.name = family + "ForSequenceClassification", .kind = HeadKind::kLabel},
      {.name = family + "ForTokenClassification",
       .kind = HeadKind::kTokenLabels,
       .module = token_module,
       .bias = true,
       .dropout = token_dropout}};
}

int64_t ReadLabels(ModelConfig& config) {
  constexpr int64_t kDefault = 2;  // transformers' PreTrainedConfig
  const int64_t named = config.Has("id2label")
                            ? std::ssize(config.Value("id2label").fields)
                            : kDefault;
  return config.Size("num_labels", std::max<int64_t>(1, named));
}

Head ReadHead(ModelConfig& config, std::span<const HeadClass> classes,
              const ImportOptions& options) {
  Head head;
  static_cast<HeadClass&>(head) = classes[0];
  const std::vector<std::string> names = config.Strings("architectures");
  if (!names.empty()) {
    const auto found = std::ranges::find(classes, names[0], &HeadClass::name);
    if (found != classes.end()) {
      static_cast<HeadClass&>(head) = *found;
    } else {
      Warn(config, options,
           "says '" + names[0] + "'; imported as '" + head.name +
               "', whose parameters and loss may be others");
    }
  }
  if (head.kind == HeadKind::kNone) {
    head.loss = LossNamed("mean_squared_error");
    Warn(config, options,
         "'" + head.name +
             "' has no loss: it is the mean squared error of its output and "
             "the input 'targets'");
  }
  if (head.kind == HeadKind::kLabel || head.kind == HeadKind::kTokenLabels) {
    head.labels = ReadLabels(config);
  }
  if (head.kind == HeadKind::kLabel) head.loss = ReadLoss(config, head.labels);
  if (head.dropout) {
    // 0.99: with nothing kept there is nothing to scale.
    head.dropout = config.Number("classifier_dropout", *head.dropout, 0, 0.99);
  }
  return head;
}

}  // namespace tessera

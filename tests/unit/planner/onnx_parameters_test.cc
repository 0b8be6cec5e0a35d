// Which initializers of an ONNX file are one parameter, and which are several.

#include "planner/io/onnx_parameters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "planner/base/file.h"
#include "planner/io/onnx.h"
#include "planner/io/published_weights.h"
#include "tests/support/onnx_bytes.h"
#include "tests/support/temp_path.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr char kSignature[] =
    "pkg.torch.export.ExportedProgram.graph_signature";
constexpr char kKind[] = "pkg.torch.export.graph_signature.InputSpec.kind";
constexpr char kFolded[] = "pkg.onnxscript.optimizer.folded_from";

const std::vector<float> kOnes(6, 1);
const std::vector<float> kZeros(6, 0);
const std::vector<float> kOthers = {1, 2, 3, 4, 5, 6};

struct Read {
  int64_t parameters = 0;
  std::vector<std::string> warnings;
  PublishedLayout layout;

  // What --export writes.
  std::set<std::string> Tensors() const {
    std::set<std::string> names;
    for (const auto& [weight, pieces] : layout.pieces) {
      for (const PublishedPiece& piece : pieces) names.insert(piece.tensor);
    }
    return names;
  }
  // Where --load finds them in the file.
  std::set<std::string> Stored() const {
    std::set<std::string> names;
    for (const auto& [weight, pieces] : layout.pieces) {
      for (const PublishedPiece& piece : pieces) {
        names.insert(piece.stored_as.empty() ? piece.tensor : piece.stored_as);
      }
    }
    return names;
  }
};
Read ReadOf(const Parts& parts) {
  const std::string path = TempPath("parameters.onnx");
  EXPECT_TRUE(WriteFileAtomically(path, BytesOf(parts)).has_value());
  Read read;
  ImportOptions options;
  options.global_batch = 4;
  options.warnings = &read.warnings;
  options.layout = &read.layout;
  const auto graph = ImportOnnx(path, options);
  EXPECT_TRUE(graph.has_value()) << graph.error().ToString();
  if (graph) read.parameters = ParameterCount(*graph);
  return read;
}

// A node with the notes of PyTorch's newer exporter: the call that it is a part
// of, what that reads, and in which module.
Message Called(Message node, const std::string& call, const std::string& reads,
               const std::string& module) {
  std::string scopes = "['', ";
  if (!module.empty()) scopes += "'" + module + "', ";
  return node
      .Add(9, NoteOf("pkg.torch.onnx.fx_node",
                     "%" + call + " : [num_users=1] = call_function[target=" +
                         "torch.ops.aten." + call + "](args = (" + reads +
                         ", 1e-05), kwargs = {})"))
      .Add(9, NoteOf("pkg.torch.onnx.name_scopes", scopes + "'" + call + "']"));
}

Message Noted(const std::string& value, const std::string& key,
              const std::string& text) {
  return Message().Text(1, value).Add(4, NoteOf(key, text));
}

std::string Listed(const std::vector<std::string>& parameters) {
  std::string text = "\n# inputs\n";
  for (const std::string& name : parameters) {
    std::string as = name;
    std::ranges::replace(as, '.', '_');
    text += "p_" + as + ": PARAMETER target='" + name + "'\n";
  }
  return text + "x: USER_INPUT\n";
}

// Two norms one behind the other, and a head [6, 3]. `second`: what the file
// says that the second one reads.
Parts TwoNorms(const std::string& second, const std::vector<float>& scale) {
  return {
      .inputs = {InputOf("x", 1, {"n", "6"})},
      .weights = {FloatsOf("a", {6}, scale), FloatsOf("b", {6}, kZeros),
                  FloatsOf("head", {6, 3}, std::vector<float>(18, 0.5))},
      .nodes = {Called(
                    NodeOf("LayerNormalization", "one", {"x", "a", "b"}, "one"),
                    "layer_norm", "%x, %p_a, %p_b", ""),
                Called(NodeOf("LayerNormalization", "two", {"one", "a", "b"},
                              "two"),
                       "layer_norm_1", "%layer_norm, " + second, ""),
                NodeOf("MatMul", "head", {"two", "head"}, "logits")},
      .values = {Noted("a", kKind, "PARAMETER"), Noted("b", kKind, "PARAMETER"),
                 Noted("head", kKind, "PARAMETER")},
      .notes = {NoteOf(kSignature, Listed({"a", "b", "c", "d", "head"}))}};
}

// Two norms that began alike, or one that is there twice.
TEST(OnnxParameters, CallsSayWhatTheyRead) {
  const Read several = ReadOf(TwoNorms("%p_c, %p_d", kOnes));
  EXPECT_EQ(several.parameters, 4 * 6 + 18);
  EXPECT_THAT(several.Tensors(),
              UnorderedElementsAre("a", "b", "c", "d", "head"));
  EXPECT_THAT(several.Stored(), UnorderedElementsAre("a", "b", "head"));
  EXPECT_THAT(several.warnings, IsEmpty());

  const Read one = ReadOf(TwoNorms("%p_a, %p_b", kOnes));
  EXPECT_EQ(one.parameters, 2 * 6 + 18);
  EXPECT_THAT(one.Tensors(), UnorderedElementsAre("a", "b", "head"));
  EXPECT_THAT(one.warnings, IsEmpty());

  // The scale of one, and a shift of its own.
  EXPECT_EQ(ReadOf(TwoNorms("%p_a, %p_d", kOnes)).parameters, 3 * 6 + 18);
}

// Two layers that began alike; PyTorch's call begins with the bias, ONNX's node
// ends with it.
TEST(OnnxParameters, CallsAndNodesMayHaveOtherOrders) {
  const std::vector<float> square = {1, 2, 3, 4};
  const std::vector<float> pair = {5, 6};
  const Read read = ReadOf(
      {.inputs = {InputOf("x", 1, {"n", "2"})},
       .weights = {FloatsOf("one.w", {2, 2}, square),
                   FloatsOf("one.b", {2}, pair)},
       .nodes = {Called(NodeOf("Gemm", "one", {"x", "one.w", "one.b"}, "one"),
                        "addmm", "%p_one_b, %x, %p_one_w", "one"),
                 Called(
                     NodeOf("Gemm", "two", {"one", "one.w", "one.b"}, "logits"),
                     "addmm_1", "%p_two_b, %one, %p_two_w", "two")},
       .values = {Noted("one.w", kKind, "PARAMETER"),
                  Noted("one.b", kKind, "PARAMETER")},
       .notes = {
           NoteOf(kSignature, Listed({"one.w", "one.b", "two.w", "two.b"}))}});
  EXPECT_EQ(read.parameters, 2 * (4 + 2));
  EXPECT_THAT(read.warnings, IsEmpty());
  for (const auto& [weight, pieces] : read.layout.pieces) {
    for (const PublishedPiece& piece : pieces) {
      const std::string& stored =
          piece.stored_as.empty() ? piece.tensor : piece.stored_as;
      EXPECT_EQ(piece.tensor.substr(4), stored.substr(4)) << piece.tensor;
    }
  }
}

// Of other files, vectors are one for each layer.
TEST(OnnxParameters, AFileThatDoesNotSayIsWarnedOf) {
  Parts parts = TwoNorms("", kOnes);
  parts.nodes = {NodeOf("LayerNormalization", "one", {"x", "a", "b"}, "one"),
                 NodeOf("LayerNormalization", "two", {"one", "a", "b"}, "two"),
                 NodeOf("MatMul", "head", {"two", "head"}, "logits")};
  const Read read = ReadOf(parts);
  EXPECT_EQ(read.parameters, 4 * 6 + 18);
  EXPECT_THAT(read.warnings,
              ElementsAre(AllOf(HasSubstr("are trained apart"),
                                HasSubstr("but may be one: 'a', 'b'"))));
}

// PyTorch's older exporter has a name for each parameter.
TEST(OnnxParameters, IdentitiesAreParameters) {
  Parts parts = TwoNorms("", kOnes);
  parts.producer = "pytorch";
  parts.values = {};
  parts.notes = {};
  parts.nodes = {
      NodeOf("LayerNormalization", "/one/Norm", {"x", "a", "b"}, "one"),
      NodeOf("LayerNormalization", "/two/Norm", {"one", "a", "b"}, "two"),
      NodeOf("MatMul", "/head/MatMul", {"two", "head"}, "logits")};
  const Read one = ReadOf(parts);
  EXPECT_EQ(one.parameters, 2 * 6 + 18);
  EXPECT_THAT(one.warnings, IsEmpty());

  parts.nodes = {
      NodeOf("Identity", "Identity_0", {"a"}, "c"),
      NodeOf("LayerNormalization", "/one/Norm", {"x", "a", "b"}, "one"),
      NodeOf("LayerNormalization", "/two/Norm", {"one", "c", "b"}, "two"),
      NodeOf("MatMul", "/head/MatMul", {"two", "head"}, "logits")};
  const Read several = ReadOf(parts);
  EXPECT_EQ(several.parameters, 3 * 6 + 18);
  EXPECT_THAT(several.Tensors(), UnorderedElementsAre("a", "b", "c", "head"));
  EXPECT_THAT(several.Stored(), UnorderedElementsAre("a", "b", "head"));
  EXPECT_THAT(several.warnings, IsEmpty());
}

// Scales that an Unsqueeze, which is folded away, stands in front of: the first
// module reads its own, and the second one's is not in the file.
Parts Viewed(const std::vector<float>& scale, const std::string& second,
             const std::string& parameter) {
  return {.inputs = {InputOf("x", 1, {"n", "6"})},
          .weights = {FloatsOf("view", {1, 6}, scale),
                      FloatsOf("head", {6, 3}, std::vector<float>(18, 0.5))},
          .nodes = {Called(NodeOf("Mul", "mul", {"view", "x"}, "mul"), "mul",
                           "%view, %x", "one"),
                    Called(NodeOf("Mul", "mul_1", {"view", "mul"}, "mul_1"),
                           "mul_1", "%view_1, %mul", second),
                    NodeOf("MatMul", "head", {"mul_1", "head"}, "logits")},
          .values = {Noted("view", kFolded, "['one.w', 'val_1']"),
                     Noted("head", kKind, "PARAMETER")},
          .notes = {NoteOf(kSignature, Listed({"one.w", parameter, "head"}))}};
}

TEST(OnnxParameters, ModulesSayWhatIsReadThroughOthers) {
  const Read several = ReadOf(Viewed(kOnes, "two", "two.w"));
  EXPECT_EQ(several.parameters, 2 * 6 + 18);
  EXPECT_THAT(several.Tensors(), UnorderedElementsAre("view", "two.w", "head"));
  EXPECT_THAT(several.warnings, IsEmpty());
  // Two of one module, which reads one behind the other; and of a list.
  EXPECT_EQ(ReadOf(Viewed(kOnes, "one", "one.v")).parameters, 2 * 6 + 18);
  EXPECT_EQ(ReadOf(Viewed(kOnes, "one", "one.list.1")).parameters, 2 * 6 + 18);
  // Other numbers may be those of one that is tied.
  EXPECT_THAT(ReadOf(Viewed(kOthers, "two", "two.w")).warnings,
              ElementsAre(HasSubstr("but may be one: 'view'")));
  // One that a module reads which it is not of.
  const Read unknown = ReadOf(Viewed(kOnes, "two", "one.v"));
  EXPECT_EQ(unknown.parameters, 6 + 18);
  EXPECT_THAT(unknown.warnings,
              ElementsAre(HasSubstr("may be several that were equal when the "
                                    "file was written: 'view'")));
  // There is no other parameter.
  EXPECT_EQ(ReadOf(Viewed(kOnes, "two", "head")).parameters, 6 + 18);
}

// A matrix that is used twice, of which the exporter has computed the transpose
// each time.
Parts Copied(const std::vector<float>& second, const std::string& of) {
  const std::vector<float> first = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  return {.inputs = {InputOf("x", 1, {"n", "3"})},
          .weights = {FloatsOf("val_1", {3, 3}, first),
                      FloatsOf("val_2", {3, 3}, second)},
          .nodes = {NodeOf("MatMul", "one", {"x", "val_1"}, "one"),
                    NodeOf("MatMul", "two", {"one", "val_2"}, "logits")},
          .values = {Noted("val_1", kFolded, "['w']"),
                     Noted("val_2", kFolded, "['" + of + "']")},
          .notes = {NoteOf(kSignature, Listed({"w", "v"}))}};
}

TEST(OnnxParameters, CopiesOfOneParameterAreOne) {
  const std::vector<float> same = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  const Read one = ReadOf(Copied(same, "w"));
  EXPECT_EQ(one.parameters, 9);
  EXPECT_THAT(one.warnings, IsEmpty());
  // Both are written back.
  EXPECT_THAT(one.Tensors(), UnorderedElementsAre("val_1", "val_2"));

  EXPECT_EQ(ReadOf(Copied(same, "v")).parameters, 18);
  // Laid out in another way it is apart, and that is said.
  const Read turned = ReadOf(Copied({1, 4, 7, 2, 5, 8, 3, 6, 9}, "w"));
  EXPECT_EQ(turned.parameters, 18);
  EXPECT_THAT(turned.warnings,
              ElementsAre(AllOf(HasSubstr("trained apart from parameters"),
                                HasSubstr("'val_2'"))));
}

// What arithmetic has made of a parameter is not that.
TEST(OnnxParameters, ArithmeticOfParametersIsSaid) {
  const auto folded = [](const std::string& name, const std::string& from) {
    return ReadOf(
        {.inputs = {InputOf("x", 1, {"n", "6"})},
         .weights = {FloatsOf(name, {6, 3}, std::vector<float>(18, 0.5))},
         .nodes = {NodeOf("MatMul", "head", {"x", name}, "logits")},
         .values = {Noted(name, kFolded, from)},
         .notes = {NoteOf(kSignature, Listed({"w", "v"}))}});
  };
  EXPECT_THAT(
      folded("div_1", "['linalg_vector_norm_1', 'val_3', 'w']").warnings,
      ElementsAre(AllOf(HasSubstr("what was computed of parameters"),
                        HasSubstr("'div_1' of 'w'"))));
  // A step between; of two.
  EXPECT_THAT(folded("val_7", "['add', 'v', 'w']").warnings,
              ElementsAre(HasSubstr("'val_7' of 'v', 'w'")));
  // Laid out otherwise it is one all the same.
  EXPECT_THAT(folded("t", "['w']").warnings, IsEmpty());
  EXPECT_THAT(folded("val_7", "['transpose_1', 'val_6', 'w']").warnings,
              IsEmpty());
}

// As many numbers as there are samples, all of them 1, are not one for each.
TEST(OnnxParameters, ChannelsAreNoSamples) {
  const auto scaled = [](const std::string& from) {
    return ReadOf(
        {.inputs = {InputOf("x", 1, {"n", "4"})},
         .weights = {FloatsOf("val_1", {1, 4}, std::vector<float>(4, 1)),
                     FloatsOf("head", {4, 3}, std::vector<float>(12, 0.5))},
         .nodes = {NodeOf("Mul", "mul", {"x", "val_1"}, "mul"),
                   NodeOf("MatMul", "head", {"mul", "head"}, "logits")},
         .values = {Noted("val_1", kFolded, from)},
         .notes = {NoteOf(kSignature, Listed({"w", "head"}))}});
  };
  EXPECT_EQ(scaled("['val_0', 'w']").parameters, 4 + 12);
}

// Running averages are each norm's own.
TEST(OnnxParameters, NormsOfOneModuleShareScaleAndShift) {
  const auto norm = [](const std::string& name, const std::string& x,
                       const std::string& call) {
    return Called(NodeOf("BatchNormalization", name,
                         {x, "a", "b", "mean", "variance"}, name),
                  call, "%x, %p_a, %p_b, %b_mean, %b_variance", "n");
  };
  Parts parts = TwoNorms("", kOthers);
  parts.weights.push_back(FloatsOf("mean", {6}, kOthers));
  parts.weights.push_back(FloatsOf("variance", {6}, kOnes));
  parts.values.push_back(Noted("mean", kKind, "BUFFER"));
  parts.values.push_back(Noted("variance", kKind, "BUFFER"));
  parts.nodes = {norm("one", "x", "batch_norm"),
                 norm("two", "one", "batch_norm_1"),
                 NodeOf("MatMul", "head", {"two", "head"}, "logits")};
  const Read read = ReadOf(parts);
  EXPECT_EQ(read.layout.pieces.size(), 2 + 4 + 1u);
  EXPECT_THAT(read.warnings, IsEmpty());
}

}  // namespace
}  // namespace tessera

// The config.json of what is exported, with keys that --set has changed.

#include "tools/export_config.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace tessera {
namespace {

std::map<std::string, JsonValue> Set(const std::string& object) {
  const auto values = ParseJson(object);
  TESSERA_CHECK(values.has_value()) << object;
  return {values->fields.begin(), values->fields.end()};
}

JsonValue Exported(const std::string& model, const std::string& set) {
  const auto text = ConfigToExport(model, Set(set));
  TESSERA_CHECK(text.has_value()) << text.error().ToString();
  return *ParseJson(*text);
}

TEST(ExportConfigTest, KeysOfAModelAreItsOwn) {
  const JsonValue config =
      Exported("zoo:gpt2-tiny", R"({"n_layer": 1, "attn_pdrop": null})");
  EXPECT_EQ(config.Field("n_layer").number, 1);
  EXPECT_FALSE(config.fields.contains("attn_pdrop"));
}

// As transformers reads it: the text's keys are those of "text_config", beside
// the part that reads images; what a model ends in is said beside both.
TEST(ExportConfigTest, KeysOfATextStayInItsConfig) {
  const JsonValue before = Exported("zoo:gemma-3-4b", "{}");
  const JsonValue after = Exported(
      "zoo:gemma-3-4b", R"({"num_hidden_layers": 2, "sliding_window": null,
                            "architectures": ["Gemma3Model"]})");
  ASSERT_EQ(before.Field("text_config").Field("sliding_window").number, 1024);
  JsonValue expected = before;
  JsonValue& text = expected.fields["text_config"];
  text.fields["num_hidden_layers"].number = 2;
  text.fields.erase("sliding_window");
  expected.fields["architectures"].items[0].text = "Gemma3Model";
  EXPECT_EQ(after.ToString(), expected.ToString());
  EXPECT_EQ(after.Field("model_type").text, "gemma3");
}

}  // namespace
}  // namespace tessera

// The config.json of what is exported, with keys that --set has changed.

#include "tools/export_config.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "costmodel/whatif/scenario.h"

namespace tessera {
namespace {

std::map<std::string, JsonValue> Set(const std::string& object) {
  const auto values = ParseJson(object);
  TESSERA_CHECK(values.has_value()) << object;
  return {values->fields.begin(), values->fields.end()};
}

std::string ExportedText(const std::string& model, const std::string& set,
                         const std::vector<std::string>& settings = {}) {
  const auto text = ConfigToExport(model, Set(set), settings);
  TESSERA_CHECK(text.has_value()) << text.error().ToString();
  return *text;
}

JsonValue Exported(const std::string& model, const std::string& set) {
  return *ParseJson(ExportedText(model, set));
}

TEST(ExportConfigTest, KeysOfAModelAreItsOwn) {
  const JsonValue config =
      Exported("zoo:gpt2-tiny", R"({"n_layer": 1, "attn_pdrop": null})");
  EXPECT_EQ(config.Field("n_layer").number, 1);
  ASSERT_TRUE(config.fields.contains("attn_pdrop"));
  EXPECT_TRUE(config.Field("attn_pdrop").is_null());
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
  text.fields["sliding_window"] = JsonValue();
  expected.fields["architectures"].items[0].text = "Gemma3Model";
  EXPECT_EQ(after.ToString(), expected.ToString());
  EXPECT_EQ(after.Field("model_type").text, "gemma3");
}

// A model of its own folder, which is removed with this.
class ExportedConfigTest : public ::testing::Test {
 protected:
  ExportedConfigTest() {
    std::string name = ::testing::TempDir() + "export_config_XXXXXX";
    folder_ = mkdtemp(name.data());
  }
  ~ExportedConfigTest() override { std::filesystem::remove_all(folder_); }

  // What becomes of `config` by --set model.KEY=VALUE.
  std::string Text(const std::string& config,
                   const std::vector<std::string>& settings) {
    std::ofstream(folder_ + "/config.json") << config;
    std::vector<Setting> keys;
    std::vector<std::string> given;
    for (const std::string& setting : settings) {
      keys.push_back(*ParseSetting(setting));
      given.push_back("model." + setting);
    }
    ImportOptions import;
    const auto set = SetModelKeys(folder_, keys, import);
    TESSERA_CHECK(set.has_value()) << set.error().ToString();
    const auto text = ConfigToExport(folder_, import.overrides, given);
    TESSERA_CHECK(text.has_value()) << text.error().ToString();
    return *text;
  }

  std::string folder_;
};

// transformers refuses 0 where it expects 0.0, and 2.0 where it expects 2.
TEST_F(ExportedConfigTest, NumbersKeepTheirForm) {
  const std::string config = R"({
  "model_type": "mixtral",
  "router_aux_loss_coef": 0.0, "router_jitter_noise":1.50 ,
  "a \"key\", {n\u0061med}": [1.0, {"}": "]"}, 12345678901234567890],
  "rms_norm_eps": 1E-5,
  "rope_theta": 1000000.0,
  "num_hidden_layers": 4,
  "sliding_window": null,
  "attn_pdrop": null
}
)";
  EXPECT_EQ(Text(config, {"layers=2.0"}), R"({
  "model_type": "mixtral",
  "router_aux_loss_coef": 0.0,
  "router_jitter_noise": 1.50,
  "a \"key\", {named}": [1.0, {"}": "]"}, 12345678901234567890],
  "rms_norm_eps": 1E-5,
  "rope_theta": 1000000.0,
  "num_hidden_layers": 2,
  "sliding_window": null,
  "attn_pdrop": null
}
)");
  EXPECT_EQ(
      Text(config,
           {"router_jitter_noise=0", "rope_theta=0.5x", "rms_norm_eps=1",
            "num_hidden_layers=2.0", "sliding_window=8", "attn_pdrop=0",
            "resid_pdrop=0", "unknown=1.0", "expert_capacity_factor=0",
            R"(rope_scaling={"factor": 2.0})", "router_aux_loss_coef=0.25",
            "model_type=mixtral", "torch_dtype=null"}),
      R"({
  "model_type": "mixtral",
  "router_aux_loss_coef": 0.25,
  "router_jitter_noise": 0.0,
  "a \"key\", {named}": [1.0, {"}": "]"}, 12345678901234567890],
  "rms_norm_eps": 1.0,
  "rope_theta": 500000.0,
  "num_hidden_layers": 2,
  "sliding_window": 8,
  "attn_pdrop": 0.0,
  "expert_capacity_factor": 0,
  "resid_pdrop": 0.0,
  "rope_scaling": {"factor": 2.0},
  "torch_dtype": null,
  "unknown": 1.0
}
)");
}

}  // namespace
}  // namespace tessera

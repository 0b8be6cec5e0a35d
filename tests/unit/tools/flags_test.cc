#include "tools/flags.h"

#include <gmock/gmock.h>

#include "tools/verb.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::string_view kAccepted[] = {
    "--model",     "--json",         "--seed",  "--profile",
    "--dtype",     "--lr",           "-o",      "--check",
    "--optimizer", "--weight-decay", "--betas", "--epsilon"};

Result<Options> Parse(const std::vector<std::string>& arguments) {
  return ParseFlags(kAccepted, 1, arguments);
}

std::string ErrorOf(const std::vector<std::string>& arguments) {
  const auto options = Parse(arguments);
  return options ? "no error" : options.error().ToString();
}

// The help breaks lines itself.
TEST(FlagsTest, EachHelpIsOneLine) {
  for (const Flag& flag : Flags()) {
    EXPECT_EQ(flag.help.find('\n'), std::string_view::npos) << flag.name;
  }
}

TEST(ParseFlagsTest, TakesValuesBehindAFlagOrAnEqualsSign) {
  const auto options = Parse({"--model", "a=b.json", "--seed=7", "-o", "x.pb"});
  ASSERT_TRUE(options) << options.error().ToString();
  EXPECT_EQ(options->model, "a=b.json");
  EXPECT_EQ(options->seed, 7u);
  EXPECT_EQ(options->output, "x.pb");
  EXPECT_FALSE(options->json);
}

TEST(ParseFlagsTest, TakesSwitchesWordsAndRepeatedFlags) {
  const auto options =
      Parse({"--json", "schedules", "--profile", "a", "--profile", "b"});
  ASSERT_TRUE(options) << options.error().ToString();
  EXPECT_TRUE(options->json);
  EXPECT_THAT(options->positional, ElementsAre("schedules"));
  EXPECT_THAT(options->profiles, ElementsAre("a", "b"));
}

TEST(ParseFlagsTest, ANumberMayBeLeftOut) {
  for (const auto& [arguments, steps] :
       std::vector<std::pair<std::vector<std::string>, int64_t>>{
           {{}, 0},
           {{"--check"}, 3},
           {{"--check", "--json"}, 3},
           {{"--check", "7", "--json"}, 7},
           {{"--check=7"}, 7}}) {
    const auto options = Parse(arguments);
    ASSERT_TRUE(options) << options.error().ToString();
    EXPECT_EQ(options->check, steps);
  }
  EXPECT_THAT(ErrorOf({"--check", "0"}), HasSubstr("--check: '0' is not"));
  EXPECT_THAT(ErrorOf({"--check", "few"}), HasSubstr("whole number"));
  EXPECT_THAT(ErrorOf({"--check", "-1"}),
              HasSubstr("--check: '-1' is not a whole number of at least 1"));
}

TEST(ParseFlagsTest, NamesWhatIsWrong) {
  EXPECT_THAT(ErrorOf({"--modle", "x"}),
              HasSubstr("unknown flag '--modle'; did you mean '--model'?"));
  // Known to other verbs only.
  EXPECT_THAT(ErrorOf({"--steps", "3"}), HasSubstr("unknown flag '--steps'"));
  EXPECT_THAT(ErrorOf({"--model"}), HasSubstr("--model: needs a value, FILE"));
  EXPECT_THAT(ErrorOf({"--model", "--json"}), HasSubstr("needs a value"));
  EXPECT_THAT(ErrorOf({"--model="}), HasSubstr("the value is empty"));
  EXPECT_THAT(ErrorOf({"--json=1"}), HasSubstr("--json: takes no value"));
  EXPECT_THAT(ErrorOf({"--seed", "1", "--seed", "2"}),
              HasSubstr("--seed: given twice"));
  EXPECT_THAT(ErrorOf({"a", "b"}), HasSubstr("unexpected word 'b'"));
}

TEST(ParseFlagsTest, RefusesValuesThatAreNone) {
  for (const char* seed : {"-1", "1.5", "1x", "", "18446744073709551616"}) {
    EXPECT_THAT(ErrorOf({"--seed", seed}), HasSubstr("whole number")) << seed;
  }
  for (const char* rate : {"nan", "inf", "-1", "fast"}) {
    EXPECT_THAT(ErrorOf({"--lr", rate}), HasSubstr("--lr: '")) << rate;
    EXPECT_THAT(ErrorOf({"--weight-decay", rate}),
                HasSubstr("--weight-decay: '"))
        << rate;
  }
  EXPECT_THAT(ErrorOf({"--dtype", "bf61"}), HasSubstr("did you mean 'bf16'?"));
  // An element type, but of tokens only.
  EXPECT_THAT(ErrorOf({"--dtype", "int32"}), HasSubstr("unknown dtype"));
}

// AdamW's and Adafactor's default is 0.1, that of gradient descent none.
TEST(ParseFlagsTest, WeightDecayIsTheOptimizersUnlessItIsGiven) {
  const auto decay = [](const std::vector<std::string>& arguments) {
    return Parse(arguments)->training.weight_decay;
  };
  EXPECT_EQ(decay({}), 0.1);
  EXPECT_EQ(decay({"--optimizer", "adafactor"}), 0.1);
  EXPECT_EQ(decay({"--optimizer", "momentum"}), 0);
  EXPECT_EQ(decay({"--optimizer", "sgd", "--weight-decay", "1e-4"}), 1e-4);
  EXPECT_EQ(decay({"--weight-decay", "0"}), 0);
  EXPECT_EQ(decay({"--optimizer", "adam", "--weight-decay", "0"}), 0);
  EXPECT_THAT(ErrorOf({"--optimizer", "adam", "--weight-decay", "0.1"}),
              HasSubstr("--weight-decay: adam has none"));
}

TEST(ParseFlagsTest, BetasAndEpsilonAreThoseOfTheOptimizer) {
  const auto adamw = Parse({"--betas", "0.8,0.999", "--epsilon", "1e-6"});
  ASSERT_TRUE(adamw) << adamw.error().ToString();
  EXPECT_EQ(adamw->training.beta1, 0.8);
  EXPECT_EQ(adamw->training.beta2, 0.999);
  EXPECT_EQ(adamw->training.epsilon, 1e-6);
  const auto momentum = Parse({"--optimizer", "momentum", "--betas", "0"});
  ASSERT_TRUE(momentum) << momentum.error().ToString();
  EXPECT_EQ(momentum->training.beta1, 0);
  EXPECT_THAT(ErrorOf({"--betas", "0.9,0.95,0.9"}),
              HasSubstr("--betas: '0.9,0.95,0.9' is not B1,B2"));
  for (const char* betas : {"1,0.9", "0.9,1", "-0.1,0.9", "0.9,", ",", "0.9,x",
                            "0.9,0.95,0.99", "nan,0.9"}) {
    EXPECT_THAT(ErrorOf({"--betas", betas}),
                HasSubstr("is not B1,B2, each of at least 0 and below 1"))
        << betas;
  }
  for (const char* epsilon : {"0", "-1e-8", "1e-60", "inf", "small"}) {
    EXPECT_THAT(ErrorOf({"--epsilon", epsilon}),
                HasSubstr("is not a number above 0 that fp32 holds"))
        << epsilon;
  }
  EXPECT_THAT(ErrorOf({"--betas", "0.9"}),
              HasSubstr("--betas: adamw has two: expected B1,B2"));
  EXPECT_THAT(ErrorOf({"--optimizer", "momentum", "--betas", "0.9,0.95"}),
              HasSubstr("--betas: momentum has one: expected B1 alone"));
  for (const char* optimizer : {"sgd", "adafactor"}) {
    EXPECT_THAT(ErrorOf({"--betas", "0.9,0.95", "--optimizer", optimizer}),
                HasSubstr(std::string("--betas: ") + optimizer + " has none"));
  }
  for (const char* optimizer : {"sgd", "adafactor", "momentum"}) {
    EXPECT_THAT(
        ErrorOf({"--epsilon", "1e-8", "--optimizer", optimizer}),
        HasSubstr(std::string("--epsilon: ") + optimizer + " has none"));
  }
}

TEST(VerbsTest, EveryFlagExistsAndIsListedOnce) {
  for (const Verb& verb : Verbs()) {
    std::vector<std::string_view> seen;
    for (const std::string_view flag : verb.flags) {
      EXPECT_EQ(FlagNamed(flag).name, flag);
      EXPECT_THAT(seen, ::testing::Not(::testing::Contains(flag))) << verb.name;
      seen.push_back(flag);
    }
    for (const std::string_view flag : verb.required) {
      EXPECT_THAT(verb.flags, ::testing::Contains(flag)) << verb.name;
    }
  }
}

TEST(VerbsTest, HelpNamesEveryFlagAndHasAnExampleWithoutUnknownFlags) {
  for (const Verb& verb : Verbs()) {
    const std::string help = HelpText(verb);
    for (const std::string_view flag : verb.flags) {
      EXPECT_THAT(help, HasSubstr("  " + std::string(flag))) << verb.name;
    }
    std::vector<std::string> words;
    std::string word;
    for (const char c : std::string(verb.example) + " ") {
      if (c != ' ') {
        word += c;
      } else {
        words.push_back(std::exchange(word, ""));
      }
    }
    ASSERT_GE(words.size(), 2u);
    EXPECT_EQ(words[0], "tessera");
    EXPECT_EQ(words[1], verb.name);
    words.erase(words.begin(), words.begin() + 2);
    const auto spaces = std::ranges::count(verb.positional, ' ');
    const size_t positional =
        verb.positional.empty() ? 0 : static_cast<size_t>(spaces) + 1;
    const auto options = ParseFlags(verb.flags, positional, words);
    EXPECT_TRUE(options) << verb.name << ": " << options.error().ToString();
  }
}

}  // namespace
}  // namespace tessera

#pragma once
// The verbs of the command line, one row each (verbs.cc), and its entry point.
//
// Exit codes: 0 done; 1 a failure on the way; 2 bad input; 3 a plan, or every
// plan that was found, does not fit the memory of the cluster, or nothing is
// the answer to a question of `whatif` (what was found is printed all the
// same); 130 interrupted. An error is one line on standard
// error, "tessera: where: message". Results go to standard output, progress and
// warnings to standard error.

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/base/result.h"
#include "tools/options.h"

namespace tessera {

struct Verb {
  std::string_view name;
  std::string_view summary;
  std::string_view details;  // further sentences of its help
  std::string_view example;
  // Placeholders of its words, or empty; in brackets: they may be left out.
  std::string_view positional;
  std::vector<std::string_view> flags;         // rows of flags.h
  std::vector<std::string_view> required;      // of these
  Result<int> (*run)(const Options& options);  // returns the exit code
};

std::span<const Verb> Verbs();

// One for each file tools/<verb>.cc.
Result<int> RunSearch(const Options& options);
Result<int> RunSimulate(const Options& options);
Result<int> RunRun(const Options& options);
Result<int> RunProfile(const Options& options);
Result<int> RunDiscover(const Options& options);
Result<int> RunValidate(const Options& options);
Result<int> RunWhatif(const Options& options);
Result<int> RunExplain(const Options& options);
Result<int> RunDiff(const Options& options);
Result<int> RunList(const Options& options);

// The help of the program, and of one verb.
std::string HelpText();
std::string HelpText(const Verb& verb);

// The exit code of a failure.
int ExitCodeOf(ErrorCode code);

// The whole program. `arguments` are without the program's name.
int RunTessera(const std::vector<std::string>& arguments);

}  // namespace tessera

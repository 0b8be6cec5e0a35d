#include "runtime/kernels/cuda/matmul_choices.h"

#include <charconv>
#include <cstdio>
#include <optional>
#include <sstream>

namespace tessera {
namespace {

constexpr std::string_view kMagic = "matmul-choices 2";
constexpr std::string_view kHeading =
    "m n k ta tb a b d lda batch epilogue accumulate alignment tf32 us "
    "algorithm";

std::optional<MatMulEpilogue> ParseEpilogue(std::string_view name) {
  for (const MatMulEpilogue epilogue :
       {MatMulEpilogue::kNone, MatMulEpilogue::kBias, MatMulEpilogue::kGelu,
        MatMulEpilogue::kBiasGelu, MatMulEpilogue::kGeluGradient}) {
    if (NameOf(epilogue) == name) return epilogue;
  }
  return std::nullopt;
}

bool ReadDType(std::istream& in, DType* dtype) {
  std::string name;
  if (!(in >> name)) return false;
  const Result<DType> parsed = ParseDType(name);
  if (parsed.has_value()) *dtype = *parsed;
  return parsed.has_value();
}

bool ReadAlgorithm(std::istream& in, std::array<uint64_t, 8>* words) {
  std::string digits;
  if (!(in >> digits) || digits.size() != 16 * words->size()) return false;
  for (size_t i = 0; i < words->size(); ++i) {
    const char* const begin = digits.data() + 16 * i;
    const auto [end, error] =
        std::from_chars(begin, begin + 16, (*words)[i], 16);
    if (error != std::errc() || end != begin + 16) return false;
  }
  return true;
}

bool ReadRow(const std::string& line, MatMulKey* key, MatMulChoice* choice) {
  std::istringstream in(line);
  MatMulProblem& p = key->problem;
  std::string epilogue;
  std::string rest;
  if (!(in >> p.m >> p.n >> p.k >> p.transpose_a >> p.transpose_b) ||
      !ReadDType(in, &p.a) || !ReadDType(in, &p.b) || !ReadDType(in, &p.d) ||
      !(in >> p.lda >> p.batch >> epilogue >> p.accumulate >> key->alignment >>
        key->tf32 >> choice->microseconds) ||
      !ReadAlgorithm(in, &choice->algorithm) || in >> rest) {
    return false;
  }
  const auto parsed = ParseEpilogue(epilogue);
  if (!parsed) return false;
  p.epilogue = *parsed;
  return p.m > 0 && p.n > 0 && p.k > 0 && p.batch > 0 &&
         (p.lda == 0 || p.lda >= p.row_of_a());
}

}  // namespace

std::string_view NameOf(MatMulEpilogue epilogue) {
  switch (epilogue) {
    case MatMulEpilogue::kNone:
      return "none";
    case MatMulEpilogue::kBias:
      return "bias";
    case MatMulEpilogue::kGelu:
      return "gelu";
    case MatMulEpilogue::kBiasGelu:
      return "bias_gelu";
    case MatMulEpilogue::kGeluGradient:
      return "gelu_gradient";
  }
  return "";
}

std::string FormatMatMulChoices(const MatMulChoices& choices) {
  std::ostringstream out;
  out << kMagic << "\ndevice " << choices.device << "\ncublaslt "
      << choices.version << "\n"
      << kHeading << "\n";
  for (const auto& [key, choice] : choices.rows) {
    const MatMulProblem& p = key.problem;
    out << p.m << " " << p.n << " " << p.k << " " << p.transpose_a << " "
        << p.transpose_b << " " << NameOf(p.a) << " " << NameOf(p.b) << " "
        << NameOf(p.d) << " " << p.lda << " " << p.batch << " "
        << NameOf(p.epilogue) << " " << p.accumulate << " " << key.alignment
        << " " << key.tf32 << " " << choice.microseconds << " ";
    for (const uint64_t word : choice.algorithm) {
      char digits[17];
      std::snprintf(digits, sizeof digits, "%016llx",
                    static_cast<unsigned long long>(word));
      out << digits;
    }
    out << "\n";
  }
  return out.str();
}

Result<MatMulChoices> ParseMatMulChoices(std::string_view text,
                                         std::string_view path) {
  MatMulChoices choices;
  std::istringstream in{std::string(text)};
  std::string line;
  int number = 0;
  const auto problem = [&](std::string_view expected) {
    return InvalidInput("'" + line + "': expected " + std::string(expected),
                        std::string(path) + ":" + std::to_string(number));
  };
  const auto next = [&] {
    line.clear();
    ++number;
    return static_cast<bool>(std::getline(in, line));
  };
  if (!next() || line != kMagic) {
    return problem("'" + std::string(kMagic) + "'");
  }
  constexpr std::string_view kDevice = "device ";
  if (!next() || line.rfind(kDevice, 0) != 0) {
    return problem("'device NAME'");
  }
  choices.device = line.substr(kDevice.size());
  constexpr std::string_view kVersion = "cublaslt ";
  if (!next() || line.rfind(kVersion, 0) != 0) {
    return problem("'cublaslt VERSION'");
  }
  const char* const begin = line.data() + kVersion.size();
  const char* const end = line.data() + line.size();
  if (std::from_chars(begin, end, choices.version).ptr != end) {
    return problem("'cublaslt VERSION'");
  }
  if (!next() || line != kHeading) {
    return problem("'" + std::string(kHeading) + "'");
  }
  while (next()) {
    MatMulKey key;
    MatMulChoice choice;
    if (!ReadRow(line, &key, &choice)) {
      return problem("values of '" + std::string(kHeading) + "'");
    }
    choices.rows[key] = choice;
  }
  return choices;
}

}  // namespace tessera

#pragma once
// Tables, paragraphs and commands for a terminal.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Columns of text: the first is aligned left, the others right. The first row
// is the heading.
std::string FormatTable(const std::vector<std::vector<std::string>>& rows);

// `text` broken at spaces into lines of at most `columns`, each but the first
// behind `indent` spaces.
std::string Wrap(std::string_view text, size_t indent, size_t columns = 80);

// `word` as a POSIX shell reads it, in quotes where it needs them.
std::string ShellWord(std::string_view word);

}  // namespace tessera

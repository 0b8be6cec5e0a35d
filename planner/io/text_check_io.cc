#include "planner/io/text_check_io.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <set>

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::io::Tokenizer;

// The text is well-formed: nothing is told of it.
class Nobody : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int, google::protobuf::io::ColumnNumber,
                const std::string&) override {}
};

// A recursive descent over the tokens of a text that protobuf has read.
class Walk {
 public:
  explicit Walk(const std::string& text)
      : stream_(text.data(), static_cast<int>(text.size())),
        tokens_(&stream_, &nobody_) {
    tokens_.set_allow_f_after_float(true);
    tokens_.set_comment_style(Tokenizer::SH_COMMENT_STYLE);
    tokens_.Next();
  }

  // The fields up to the end, or the bracket that closes the message.
  Result<void> Message(const Descriptor& type) {
    std::set<const FieldDescriptor*> seen;
    while (tokens_.current().type != Tokenizer::TYPE_END && !At("}") &&
           !At(">")) {
      const Tokenizer::Token name = tokens_.current();
      const FieldDescriptor* const field = type.FindFieldByName(name.text);
      if (field == nullptr) return {};  // None of ours has an extension.
      if (!field->is_repeated() && !seen.insert(field).second) {
        return InvalidInput("field '" + name.text + "' occurs twice",
                            std::to_string(name.line + 1) + ":" +
                                std::to_string(name.column + 1));
      }
      tokens_.Next();
      Skip(":");
      TESSERA_RETURN_IF_ERROR(Value(*field));
      if (!Skip(",")) Skip(";");
    }
    return {};
  }

 private:
  bool At(std::string_view symbol) {
    const Tokenizer::Token& token = tokens_.current();
    return token.type == Tokenizer::TYPE_SYMBOL && token.text == symbol;
  }
  bool Skip(std::string_view symbol) {
    if (!At(symbol)) return false;
    tokens_.Next();
    return true;
  }

  // One, or a list in brackets.
  Result<void> Value(const FieldDescriptor& field) {
    if (!Skip("[")) return Single(field);
    while (!Skip("]")) {
      TESSERA_RETURN_IF_ERROR(Single(field));
      Skip(",");
    }
    return {};
  }
  Result<void> Single(const FieldDescriptor& field) {
    if (Skip("{") || Skip("<")) {
      TESSERA_RETURN_IF_ERROR(Message(*field.message_type()));
      tokens_.Next();
      return {};
    }
    Skip("-");
    // A text may be in several pieces.
    const bool text = tokens_.current().type == Tokenizer::TYPE_STRING;
    tokens_.Next();
    while (text && tokens_.current().type == Tokenizer::TYPE_STRING) {
      tokens_.Next();
    }
    return {};
  }

  google::protobuf::io::ArrayInputStream stream_;
  Nobody nobody_;
  Tokenizer tokens_;
};

}  // namespace

Result<void> CheckTextFields(const std::string& text, const Descriptor& type) {
  return Walk(text).Message(type);
}

}  // namespace tessera

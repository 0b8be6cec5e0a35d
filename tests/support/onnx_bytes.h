#pragma once
// ONNX files written byte by byte, for tests.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "planner/ir/graph.h"

namespace tessera {

// A message of protobuf's wire format, field by field, with the field numbers
// of ONNX's onnx.proto.
class Message {
 public:
  Message& Number(int field, int64_t value) {
    Varint(static_cast<uint64_t>(field) << 3);
    Varint(static_cast<uint64_t>(value));
    return *this;
  }
  Message& Float(int field, float value) {
    Varint(static_cast<uint64_t>(field) << 3 | 5);
    bytes_.append(sizeof(value), '\0');
    std::memcpy(bytes_.data() + bytes_.size() - sizeof(value), &value,
                sizeof(value));
    return *this;
  }
  Message& Text(int field, const std::string& value) {
    Varint(static_cast<uint64_t>(field) << 3 | 2);
    Varint(value.size());
    bytes_ += value;
    return *this;
  }
  Message& Add(int field, const Message& message) {
    return Text(field, message.bytes_);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void Varint(uint64_t value) {
    for (; value >= 128; value >>= 7) {
      bytes_ += static_cast<char>((value & 127) | 128);
    }
    bytes_ += static_cast<char>(value);
  }

  std::string bytes_;
};

// "" stands for no dimension; a number for an extent, else a symbol.
inline Message InputOf(const std::string& name, int type,
                       const std::vector<std::string>& dims) {
  Message shape;
  for (const std::string& dim : dims) {
    const bool symbol = dim.find_first_not_of("0123456789") != dim.npos;
    shape.Add(1, symbol ? Message().Text(2, dim)
                        : Message().Number(1, std::stoll(dim)));
  }
  const Message tensor = Message().Number(1, type).Add(2, shape);
  return Message().Text(1, name).Add(2, Message().Add(1, tensor));
}

inline Message IntAttribute(const std::string& name, int64_t value) {
  return Message().Text(1, name).Number(3, value).Number(20, 2);
}

inline Message FloatAttribute(const std::string& name, float value) {
  return Message().Text(1, name).Float(2, value).Number(20, 1);
}

inline Message NodeOf(const std::string& op, const std::string& name,
                      const std::vector<std::string>& inputs,
                      const std::string& output,
                      const std::vector<Message>& attributes = {}) {
  Message node;
  for (const std::string& input : inputs) node.Text(1, input);
  node.Text(2, output).Text(3, name).Text(4, op);
  for (const Message& attribute : attributes) node.Add(5, attribute);
  return node;
}

// A tensor whose elements are in another file, which is not there.
inline Message WeightOf(const std::string& name, const Shape& dims) {
  Message tensor;
  for (int64_t extent : dims) tensor.Number(1, extent);
  return tensor.Number(2, 1).Text(8, name).Number(14, 1);
}

inline Message IntsOf(const std::string& name,
                      const std::vector<int64_t>& values) {
  Message tensor;
  tensor.Number(1, std::ssize(values)).Number(2, 7).Text(8, name);
  for (int64_t value : values) tensor.Number(7, value);
  return tensor;
}

// A tensor of fp32 whose elements are in the file.
inline Message FloatsOf(const std::string& name, const Shape& dims,
                        const std::vector<float>& values) {
  Message tensor;
  for (int64_t extent : dims) tensor.Number(1, extent);
  std::string bytes(values.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return tensor.Number(2, 1).Text(8, name).Text(9, bytes);
}

inline Message NoteOf(const std::string& key, const std::string& value) {
  return Message().Text(1, key).Text(2, value);
}

struct Parts {
  std::vector<Message> inputs;
  std::vector<Message> weights;
  std::vector<Message> nodes;
  std::string output = "logits";  // "": none
  int64_t opset = 17;
  std::vector<Message> values = {};  // value_info
  std::vector<Message> notes = {};   // the graph's metadata_props
  std::string producer = "";
};

inline std::string BytesOf(const Parts& parts) {
  Message graph;
  for (const Message& node : parts.nodes) graph.Add(1, node);
  graph.Text(2, "test");
  for (const Message& weight : parts.weights) graph.Add(5, weight);
  for (const Message& input : parts.inputs) graph.Add(11, input);
  if (!parts.output.empty()) graph.Add(12, InputOf(parts.output, 1, {}));
  for (const Message& value : parts.values) graph.Add(13, value);
  for (const Message& note : parts.notes) graph.Add(16, note);
  return Message()
      .Number(1, 8)
      .Text(2, parts.producer)
      .Add(7, graph)
      .Add(8, Message().Number(2, parts.opset))
      .bytes();
}

}  // namespace tessera

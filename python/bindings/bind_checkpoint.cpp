// Export and checkpoint files for Python: the layout, the parser and the writer. python/zeropg/rank_io/staged_files.py
// drives them.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "python/bindings/bindings.h"
#include "python/bindings/release_gil.h"
#include "sharding/checkpoint/checksum.h"
#include "sharding/checkpoint/crc32c.h"
#include "sharding/checkpoint/layout.h"
#include "sharding/checkpoint/reader.h"
#include "sharding/checkpoint/safetensors.h"
#include "sharding/checkpoint/writer.h"

namespace py = pybind11;

namespace zeropg {
namespace {

std::span<const std::byte> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

Layout plan(const std::vector<std::string>& names, const std::vector<std::vector<int64_t>>& shapes,
            const std::vector<at::ScalarType>& dtypes, uint64_t max_file_bytes, const std::string& stem,
            const safetensors::Metadata& metadata) {
  TORCH_CHECK_VALUE(names.size() == shapes.size() && names.size() == dtypes.size(),
                    "names, shapes and dtypes differ in length");
  std::vector<TensorSpec> tensors;
  for (size_t index = 0; index < names.size(); ++index) tensors.push_back({names[index], shapes[index], dtypes[index]});
  return plan_layout(tensors, max_file_bytes, stem, metadata);
}

// [(name, dtype, shape, begin, end)], metadata, data_offset
py::tuple parse(const py::bytes& head, uint64_t file_bytes) {
  const safetensors::Header header =
      safetensors::parse_header(as_bytes(static_cast<std::string_view>(head)), file_bytes);
  py::list tensors;
  for (const safetensors::TensorEntry& tensor : header.tensors) {
    tensors.append(py::make_tuple(tensor.name, tensor.dtype, tensor.shape, tensor.begin, tensor.end));
  }
  return py::make_tuple(tensors, header.metadata, header.data_offset);
}

using Piece = std::tuple<uint64_t, uint64_t, uint32_t>;  // start, stop, checksum

std::vector<Piece> pieces_of(const FileWriter& writer) {
  std::vector<Piece> result;
  for (const ChecksumPiece& piece : writer.checksums()) result.emplace_back(piece.start, piece.stop, piece.crc);
  return result;
}

std::vector<uint32_t> join(const std::vector<Piece>& pieces, uint64_t file_bytes, uint64_t chunk_bytes) {
  std::vector<ChecksumPiece> parts;
  for (const auto& [start, stop, crc] : pieces) parts.push_back({start, stop, crc});
  return join_pieces(std::move(parts), file_bytes, chunk_bytes);
}

uint32_t checksum(const py::bytes& bytes) { return crc32c(as_bytes(static_cast<std::string_view>(bytes))); }

}  // namespace

void bind_checkpoint(py::module_& m) {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const FileError& error) {
      // With two arguments Python picks the subclass (FileNotFoundError, PermissionError ...) by errno.
      const py::object arguments = py::make_tuple(error.code(), error.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    } catch (const c10::ValueError& error) {
      PyErr_SetString(PyExc_ValueError, error.what_without_backtrace());
    }
  });

  py::class_<FileLayout>(m, "FileLayout")
      .def_readonly("name", &FileLayout::name)
      .def_property_readonly("header", [](const FileLayout& file) { return py::bytes(file.header); })
      .def_readonly("bytes", &FileLayout::bytes);
  py::class_<TensorPlace>(m, "TensorPlace")
      .def_readonly("file", &TensorPlace::file)
      .def_readonly("offset", &TensorPlace::offset);
  py::class_<Layout>(m, "Layout")
      .def_readonly("files", &Layout::files)
      .def_readonly("places", &Layout::places)
      .def_readonly("tensor_bytes", &Layout::tensor_bytes);
  m.def("plan_layout", torch::wrap_pybind_function_no_gil(plan), py::kw_only(), py::arg("names"), py::arg("shapes"),
        py::arg("dtypes"), py::arg("max_file_bytes"), py::arg("stem"), py::arg("metadata"),
        "Lays tensors out in safetensors files; a pure function of its arguments.");
  m.def("parse_safetensors_header", torch::wrap_pybind_function(parse), py::arg("head"), py::arg("file_bytes"),
        "Parses and validates the head of an untrusted safetensors file: (tensors, metadata, data_offset).");

  py::class_<StagingBuffer>(m, "StagingBuffer").def(py::init<>());
  py::class_<FileWriter>(m, "FileWriter")
      .def_static("create", &FileWriter::create, py::arg("path"), py::arg("bytes"), ReleaseGil())
      .def_static("open", &FileWriter::open, py::arg("path"), py::arg("bytes"), ReleaseGil())
      .def(
          "write",
          [](FileWriter& writer, uint64_t offset, const at::Tensor& flat, at::ScalarType dtype,
             StagingBuffer& staging) { writer.write(offset, flat, dtype, staging); },
          py::arg("offset"), py::arg("flat"), py::arg("dtype"), py::arg("staging"), ReleaseGil())
      .def(
          "write_bytes",
          [](FileWriter& writer, uint64_t offset, const py::bytes& bytes) {
            const auto view = as_bytes(static_cast<std::string_view>(bytes));
            const WithoutGil no_gil;
            writer.write(offset, view);
          },
          py::arg("offset"), py::arg("bytes"))
      .def("keep_checksums", &FileWriter::keep_checksums, py::arg("chunk_bytes"))
      .def("checksums", &pieces_of, "[(start, stop, CRC-32C)] of what was written, in pieces inside one chunk each.")
      .def("sync", &FileWriter::sync, ReleaseGil())
      .def("close", &FileWriter::close, ReleaseGil())
      .def_property_readonly("path", &FileWriter::path)
      .def_property_readonly("bytes", &FileWriter::bytes);

  py::class_<FileReader>(m, "FileReader", "Reads ranges of a file, whole chunks with their checksums verified.")
      .def(py::init<std::string, uint64_t, uint64_t, std::vector<uint32_t>>(), py::arg("path"), py::arg("bytes"),
           py::arg("chunk_bytes"), py::arg("checksums"), ReleaseGil())
      .def("read", &FileReader::read, py::arg("offset"), py::arg("dtype"), py::arg("flat"), ReleaseGil())
      .def(
          "read_bytes",
          [](FileReader& reader, uint64_t offset, uint64_t bytes) {
            return py::bytes(reader.read_bytes(offset, bytes));
          },
          py::arg("offset"), py::arg("bytes"))
      .def_property_readonly("path", &FileReader::path)
      .def_property_readonly("bytes", &FileReader::bytes);
  m.def("crc32c", torch::wrap_pybind_function(checksum), py::arg("bytes"));
  m.def("join_checksums", torch::wrap_pybind_function_no_gil(join), py::arg("pieces"), py::arg("file_bytes"),
        py::arg("chunk_bytes"), "One checksum per chunk of a file from the pieces of all its writers.");
}

}  // namespace zeropg

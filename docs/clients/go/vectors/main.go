// go run ./vectors DIRECTORY_OF_VECTORS
//
// Reads and writes every vector of docs/reference/protocol with kjo.go. Prints how many of each kind
// it has read and written; fails and names those that differ.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"reflect"
	"sort"
	"time"

	"example.com/kjo"
	"github.com/twmb/franz-go/pkg/kgo"
)

// octets are bytes as the vectors have them: text, {"base64": …} or null.
type octets []byte

func (value *octets) UnmarshalJSON(given []byte) error {
	if given[0] == '{' {
		var coded struct{ Base64 []byte }
		err := json.Unmarshal(given, &coded)
		*value = coded.Base64
		return err
	}
	var text *string
	err := json.Unmarshal(given, &text)
	if text != nil {
		*value = append([]byte{}, *text...)
	}
	return err
}

type record struct {
	Topic     string
	Partition int32
	Offset    int64
	Timestamp time.Time
	Key       octets
	Value     octets
	Headers   [][2]octets
}

func (given *record) received() *kgo.Record {
	if given == nil {
		return nil
	}
	found := &kgo.Record{
		Topic: given.Topic, Partition: given.Partition, Offset: given.Offset,
		Timestamp: given.Timestamp, Key: given.Key, Value: given.Value,
	}
	for _, pair := range given.Headers {
		found.Headers = append(found.Headers, kgo.RecordHeader{Key: string(pair[0]), Value: pair[1]})
	}
	return found
}

type vector struct {
	Name  string
	Given *struct {
		Topic    string
		Event    json.RawMessage
		Headers  map[string]string
		Consumer string
		Now      time.Time
		Answer   kjo.Answer
		Error    string
		Config   struct {
			Topic       string `json:"dlq_topic"`
			Again       string `json:"redelivery_topic"`
			Redelivered *int   `json:"max_redeliveries"`
			Kills       *int   `json:"max_kills"`
			Informs     bool   `json:"informational_headers"`
		}
		Record record
	}
	Status   string
	Record   *record
	Message  map[string]any
	Error    *struct{ Reason string }
	Conforms bool
}

var failures int

func main() {
	for _, kind := range []string{"job", "dead-letter", "replay", "event", "kdlq"} {
		var file struct{ Vectors []vector }
		content, err := os.ReadFile(filepath.Join(os.Args[1], kind+".vectors.json"))
		if err == nil {
			err = json.Unmarshal(content, &file)
		}
		if err != nil {
			log.Fatal(err)
		}
		read, written := 0, 0
		for _, one := range file.Vectors {
			name := kind + ": " + one.Name
			if one.Record != nil {
				check(name+", read", reading(kind, one.Record.received()), expected(one))
				read++
			}
			if status, sent, isWritten := writing(kind, one); isWritten {
				check(name+", status", status, one.Status)
				check(name+", written", comparable(sent), comparable(one.Record.received()))
				written++
			}
		}
		fmt.Printf("%s: %d read, %d written\n", kind, read, written)
	}
	if failures > 0 {
		os.Exit(1)
	}
}

func check(name string, found, wanted any) {
	if !reflect.DeepEqual(found, wanted) {
		failures++
		fmt.Printf("%s:\n  found  %v\n  wanted %v\n", name, found, wanted)
	}
}

// plain returns a value as it is read from JSON, for comparison.
func plain(value any) (found any) {
	text, err := json.Marshal(value)
	if err == nil {
		err = json.Unmarshal(text, &found)
	}
	if err != nil {
		log.Fatal(err)
	}
	return found
}

// comparable returns what two records are compared by: values in JSON as what they mean, headers in
// no order.
func comparable(record *kgo.Record) any {
	if record == nil {
		return nil
	}
	var headers []string
	for _, header := range record.Headers {
		headers = append(headers, fmt.Sprintf("%s=%x", header.Key, header.Value))
	}
	sort.Strings(headers)
	var body any
	if json.Unmarshal(record.Value, &body) != nil {
		body = fmt.Sprintf("%x", record.Value)
	}
	return []any{record.Topic, record.Key == nil, string(record.Key), headers, body}
}

// --- Reading -------------------------------------------------------------------------------------

func reading(kind string, record *kgo.Record) any {
	var found any
	var err error
	switch kind {
	case "event":
		found, err = readEvent(record)
	case "kdlq":
		found = map[string]int{
			"KDLQ_Redelivered": kjo.Counter(record, "KDLQ_Redelivered"),
			"KDLQ_Kills":       kjo.Counter(record, "KDLQ_Kills"),
		}
	default:
		found, err = readJob(record)
	}
	if refused, isRefused := err.(*kjo.Refused); isRefused {
		return "refused: " + refused.Reason
	}
	return plain(found)
}

func readJob(record *kgo.Record) (any, error) {
	job, err := kjo.ReadJob(record)
	if err != nil {
		return nil, err
	}
	found := map[string]any{
		"id": job.ID, "type": job.Type, "job_id": nil, "service": job.Service,
		"generation": job.Generation, "attempt": job.Attempt, "replay_count": job.ReplayCount,
		"content_type": job.ContentType, "arguments": job.Arguments,
	}
	if job.JobID != "" {
		found["job_id"] = job.JobID
	}
	return found, nil
}

func readEvent(record *kgo.Record) (any, error) {
	event, err := kjo.ReadEvent(record, map[string][]string{"USER_RENAMED": {"1"}})
	if event == nil || err != nil {
		return map[string]bool{"passed_over": true}, err
	}
	found := plain(event).(map[string]any)
	found["key"] = event.Key()
	return found, nil
}

func expected(vector vector) any {
	if vector.Message["content_type"] == "application/msgpack" {
		// A reader may leave out MessagePack; to it that is a content type it does not know.
		return "refused: deserialization"
	}
	if vector.Error != nil {
		return "refused: " + vector.Error.Reason
	}
	return any(vector.Message)
}

// --- Writing -------------------------------------------------------------------------------------

func writing(kind string, vector vector) (status string, sent *kgo.Record, isWritten bool) {
	var err error
	switch {
	case kind == "job" && isOfAnotherService(vector):
		sent, err = writeJob(vector)
	case kind == "event" && vector.Given != nil:
		sent, err = writeEvent(vector)
	case kind == "kdlq" && vector.Given != nil:
		status, sent = decide(vector)
	default:
		return "", nil, false
	}
	if err != nil {
		log.Fatal(vector.Name, ": ", err)
	}
	return status, sent, true
}

// isOfAnotherService says whether a service that stores no jobs sends this: each header once, none
// of a stored job's.
func isOfAnotherService(vector vector) bool {
	names := map[string]bool{}
	if !vector.Conforms || vector.Message == nil {
		return false
	}
	for _, pair := range vector.Record.Headers {
		names[string(pair[0])] = true
	}
	ours := map[string]any{
		"job_id": nil, "service": "", "generation": 1.0, "attempt": 1.0, "replay_count": 0.0,
	}
	for name, value := range ours {
		if vector.Message[name] != value {
			return false
		}
	}
	return len(names) == len(vector.Record.Headers)
}

func writeJob(vector vector) (*kgo.Record, error) {
	id, kind := vector.Message["id"].(string), vector.Message["type"].(string)
	record := vector.Record.received()
	job, err := kjo.NewJob(record.Topic, string(record.Key), id, kind, vector.Message["arguments"])
	for _, header := range record.Headers {
		if err == nil && header.Key != "kjo-id" && header.Key != "kjo-type" {
			job.Headers = append(job.Headers, header)
		}
	}
	return job, err
}

func writeEvent(vector vector) (*kgo.Record, error) {
	var given kjo.Event
	decoder := json.NewDecoder(bytes.NewReader(vector.Given.Event))
	decoder.UseNumber()
	if err := decoder.Decode(&given); err != nil {
		return nil, err
	}
	event, err := kjo.NewEvent(vector.Given.Topic, given)
	if err != nil {
		return nil, err
	}
	for name, value := range vector.Given.Headers {
		event.Headers = append(event.Headers, kgo.RecordHeader{Key: name, Value: []byte(value)})
	}
	return event, err
}

func decide(vector vector) (string, *kgo.Record) {
	given := vector.Given
	config := kjo.Config{
		Consumer: given.Consumer, DlqTopic: given.Config.Topic, RedeliveryTopic: given.Config.Again,
		MaxRedeliveries: -1, MaxKills: -1, InformationalHeaders: given.Config.Informs,
	}
	if given.Config.Redelivered != nil {
		config.MaxRedeliveries = *given.Config.Redelivered
	}
	if given.Config.Kills != nil {
		config.MaxKills = *given.Config.Kills
	}
	var failure *kjo.Failure
	if given.Error != "" {
		failure = &kjo.Failure{Class: "kjo_django.exceptions.PermanentError", Message: given.Error}
	}
	return kjo.Decide(given.Record.received(), given.Answer, config, failure, given.Now)
}

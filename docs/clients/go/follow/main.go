// go run ./follow TOPIC_OF_EVENTS CONSUMER_GROUP
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"example.com/kjo"
)

func main() {
	client, err := kjo.Consume(os.Args[2], os.Args[1])
	for ctx := context.Background(); err == nil; err = client.CommitUncommittedOffsets(ctx) {
		for _, record := range client.PollFetches(ctx).Records() {
			event, err := kjo.ReadEvent(record, map[string][]string{"ORDER_PAID": {"1"}})
			if refused, isRefused := err.(*kjo.Refused); isRefused {
				fmt.Println("refused:", refused.Reason)
			} else if event != nil {
				fmt.Println(event.Data["order"], "is paid by", event.Key())
			}
		}
	}
	log.Fatal(err)
}
